-- #include lifecycle
-- #include stream
-- Removes the record of a trace that the queue refused. A trace of another model, one that an engine runs and one that
-- has ended stay.
-- KEYS: record, events. ARGV: trace, model. Returns whether the record was removed.
local key, events = unpack(KEYS)
local lifecycle_stream, deadlines = lifecycle.beside(key)
local trace, model = unpack(ARGV)
local own_model, engine, client = unpack(redis.call('HMGET', key, 'm', 'e', 'c'))
if own_model ~= model or engine or stream.ended(events) then return 0 end
redis.call('ZREM', deadlines, trace)
redis.call('DEL', key)
lifecycle.publish(lifecycle_stream, 'k', 'refused', 't', trace, 'm', model, 'c', client or '')
return 1
