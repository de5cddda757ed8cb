-- #include finished
-- Lists the finished traces of one hash tag that expire first.
-- KEYS: finished traces, their sizes. ARGV: how many to list. Returns how many there are, the bytes that they take,
-- then of each listed one: when it expires in ms, the bytes that it takes, its id.
local list, sizes = unpack(KEYS)
local count = tonumber(ARGV[1])
finished.remove_expired(list, sizes, 1000)
local reply = {redis.call('ZCARD', list), finished.sum(sizes)}
if count == 0 then return reply end
local oldest = redis.call('ZRANGE', list, 0, count - 1, 'WITHSCORES')
for index = 1, #oldest, 2 do
  local trace, expires_at = oldest[index], oldest[index + 1]
  reply[#reply + 1] = tonumber(expires_at)
  reply[#reply + 1] = tonumber(redis.call('HGET', sizes, trace)) or 0
  reply[#reply + 1] = trace
end
return reply
