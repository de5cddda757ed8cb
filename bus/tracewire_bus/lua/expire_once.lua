-- Gives a key an expiry if it has none (EXPIRE with NX needs Redis 7).
-- KEYS: the key. ARGV: seconds.
local key, seconds = KEYS[1], ARGV[1]
if redis.call('TTL', key) == -1 then redis.call('EXPIRE', key, seconds) end
return 1
