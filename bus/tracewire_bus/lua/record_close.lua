-- Has a trace whose end is near accept no more changes, if this is its last attempt.
-- KEYS: record, changes. ARGV: attempt. Returns the changes of live parameters that no event has reported.
local key, changes = unpack(KEYS)
local attempt = tonumber(ARGV[1])
-- A full Redis refuses a script at its first write. HDEL is never refused.
redis.call('HDEL', key, '')
-- A record that has expired is not begun again: it would stay for good.
if redis.call('EXISTS', key) == 0 then return {} end
if (tonumber(redis.call('HGET', key, 'a')) or 0) > attempt then return {} end
redis.call('HSET', key, 's', 'closed')
return redis.call('ZRANGE', changes, 0, -1)
