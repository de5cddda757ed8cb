-- #include lifecycle
-- Removes the record of a trace that the queue refused. A trace of another model, or one that an engine runs, stays.
-- KEYS: record, deadlines, lifecycle stream. ARGV: trace, model. Returns whether the record was removed.
local key, deadlines, lifecycle_stream = unpack(KEYS)
local trace, model = unpack(ARGV)
local own_model, engine, client = unpack(redis.call('HMGET', key, 'm', 'e', 'c'))
if own_model ~= model or engine then return 0 end
redis.call('ZREM', deadlines, trace)
redis.call('DEL', key)
lifecycle.publish(lifecycle_stream, 'k', 'refused', 't', trace, 'm', model, 'c', client or '')
return 1
