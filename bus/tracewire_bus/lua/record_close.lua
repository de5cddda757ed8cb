-- Closes a trace that is about to end against further changes, if this is its last attempt.
-- KEYS: record, changes. ARGV: attempt. Returns the changes of live parameters that no event has reported.
local key, changes = unpack(KEYS)
local attempt = tonumber(ARGV[1])
-- If its memory is full, Redis refuses a script at its first write, but never HDEL. So HDEL comes first.
redis.call('HDEL', key, '')
-- A write would make an expired record again, one that never expires.
if redis.call('EXISTS', key) == 0 then return {} end
if (tonumber(redis.call('HGET', key, 'a')) or 0) > attempt then return {} end
redis.call('HSET', key, 's', 'closed')
return redis.call('ZRANGE', changes, 0, -1)
