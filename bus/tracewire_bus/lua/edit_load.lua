-- Reads the standing interventions of a model at one moment.
-- KEYS: those of edit_install. Returns the generation, the encoded edits, their descriptions, the disabled edits, and
-- the signatures of removals.
local state, entries, about, disabled, _, removed = unpack(KEYS)
return {
  redis.call('HGET', state, 'generation') or '0',
  redis.call('HGETALL', entries), redis.call('HGETALL', about), redis.call('HGETALL', disabled),
  removed and redis.call('HGETALL', removed) or {}
}
