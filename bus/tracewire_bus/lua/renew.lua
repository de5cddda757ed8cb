-- Sets a key that expires. A full Redis takes it, too: DEL is never refused, and Redis refuses a script only at its
-- first write.
-- KEYS: the key. ARGV: value, expiry in ms.
local key = KEYS[1]
local value, milliseconds = unpack(ARGV)
redis.call('DEL', key)
return redis.call('SET', key, value, 'PX', milliseconds)
