-- Reads the standing interventions of a model at one moment.
-- KEYS: those of edit_install. Returns the generation, the encoded edits, their descriptions, and the disabled edits.
local state, entries, about, disabled = unpack(KEYS, 1, 4)
return {
  redis.call('HGET', state, 'generation') or '0',
  redis.call('HGETALL', entries), redis.call('HGETALL', about), redis.call('HGETALL', disabled)
}
