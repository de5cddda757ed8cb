-- #include record
-- Notes that the engine of a trace's last attempt runs the trace no longer, before it puts the trace's entry back.
-- KEYS: record. ARGV: engine, attempt. Returns whether this was the last attempt.
local key = KEYS[1]
local engine, attempt = unpack(ARGV)
-- If its memory is full, Redis refuses a script at its first write, but never HDEL. So HDEL comes first.
redis.call('HDEL', key, '')
local attempts, last_engine = unpack(redis.call('HMGET', key, 'a', 'e'))
if last_engine ~= engine or record.count(attempts) ~= tonumber(attempt) then return 0 end
redis.call('HSET', key, 's', 'waiting')
return 1
