-- #include clock
-- Removes a version of a name. Its number is not given again, and its description stays, with the time and the author.
-- KEYS: those of library_put. ARGV: name, version, author, how many descriptions are kept, operation.
-- Returns 1, or 0 if there is no such version.
local _, newest, entries, about, arrays = unpack(KEYS)
local name, version, author, most, operation = unpack(ARGV)
local field = name .. '@' .. version
local said = redis.call('HGET', about, field)
if not said then return 0 end
-- A client asks again after a lost reply.
if string.find(said, ' ' .. operation .. ' ', 1, true) then return 1 end
if redis.call('HDEL', entries, field) == 0 then return 0 end
redis.call('DEL', arrays)
if redis.call('HLEN', about) > tonumber(most) then
  redis.call('HDEL', about, field)
else
  redis.call('HSET', about, field, said .. ' ' .. clock.milliseconds() .. ' ' .. operation .. ' ' .. author)
end
if redis.call('HGET', newest, name) ~= version then return 1 end
for earlier = version - 1, 1, -1 do
  if redis.call('HEXISTS', entries, name .. '@' .. earlier) == 1 then
    redis.call('HSET', newest, name, earlier)
    return 1
  end
end
redis.call('HDEL', newest, name)
return 1
