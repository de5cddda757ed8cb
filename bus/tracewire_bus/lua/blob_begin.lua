-- Writes the first chunk of a blob, whose key may be new, and gives the key an expiry if it has none.
-- KEYS: the trace's blobs. ARGV: seconds, field, chunk.
local blobs = KEYS[1]
local seconds, field, chunk = unpack(ARGV)
redis.call('HSET', blobs, field, chunk)
if redis.call('TTL', blobs) == -1 then redis.call('EXPIRE', blobs, seconds) end
return 1
