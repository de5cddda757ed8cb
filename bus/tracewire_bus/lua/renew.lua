-- Sets a key that expires, even if the memory of Redis is full: Redis then refuses a script at its first write, but
-- never DEL.
-- KEYS: the key. ARGV: value, expiry in ms.
local key = KEYS[1]
local value, milliseconds = unpack(ARGV)
redis.call('DEL', key)
return redis.call('SET', key, value, 'PX', milliseconds)
