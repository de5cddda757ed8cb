-- #include clock
-- #include lifecycle
-- Makes the record of a trace that is about to be queued.
-- KEYS: record. ARGV: trace, model, client, lease, deadline in ms from now or '', for how many seconds to remember the
-- record, for how many to keep the trace after its end or '', the id of the submitter's key or '', the record's owner or
-- '', then name, form and packed value of each live parameter. Returns 1 if the record is new and 0 if it exists; or the
-- other model, if a trace of another model has this id.
local key = KEYS[1]
local lifecycle_stream, deadlines = lifecycle.beside(key)
local trace, model, client, lease, deadline, remember, retention, signer, owner = unpack(ARGV, 1, 9)
if redis.call('HSETNX', key, 'm', model) == 0 then
  local other = redis.call('HGET', key, 'm')
  return other == model and 0 or other
end
redis.call('HSET', key, 'c', client, 'p', lease, 'v', 0)
if retention ~= '' then redis.call('HSET', key, 'r', retention) end
if signer ~= '' then redis.call('HSET', key, 'k', signer) end
if owner ~= '' then redis.call('HSET', key, 'o', owner) end
for index = 10, #ARGV, 3 do
  local name, form, packed = unpack(ARGV, index, index + 2)
  redis.call('HSET', key, 'f:' .. name, form, 'l:' .. name, packed)
end
redis.call('EXPIRE', key, remember)
if deadline ~= '' then
  local at = clock.milliseconds() + deadline
  redis.call('HSET', key, 't', at)
  redis.call('ZADD', deadlines, at, trace)
end
lifecycle.publish(lifecycle_stream, 'k', 'queued', 't', trace, 'm', model, 'c', client)
return 1
