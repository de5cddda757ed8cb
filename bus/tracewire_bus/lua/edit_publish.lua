-- Appends a record to an edit's stream, and removes the oldest records while the stream is larger than its bound.
-- KEYS: the edit's stream, the sizes of all such streams of the model. ARGV: edit, the bound in bytes, for how many
-- seconds to keep the stream, schema, encoded record.
local stream, sizes = unpack(KEYS)
local edit, bound, keep_seconds, schema, data = unpack(ARGV)
local OVERHEAD = 200
local size = #data + OVERHEAD
-- The size of a stream that has expired does not count.
if redis.call('EXISTS', stream) == 0 then redis.call('HDEL', sizes, edit) end
redis.call('XADD', stream, '*', 'n', size, 'v', schema, 'd', data)
local total = redis.call('HINCRBY', sizes, edit, size)
while total > tonumber(bound) do
  local oldest, next_one = unpack(redis.call('XRANGE', stream, '-', '+', 'COUNT', 2))
  if not next_one then break end
  local oldest_size = tonumber(oldest[2][2])
  total = redis.call('HINCRBY', sizes, edit, -oldest_size)
  redis.call('XTRIM', stream, 'MINID', next_one[1])
end
redis.call('EXPIRE', stream, keep_seconds)
redis.call('EXPIRE', sizes, keep_seconds)
