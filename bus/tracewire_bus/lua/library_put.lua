-- #include clock
-- Makes an uploaded set of arrays the next version of a name.
-- KEYS: last versions, newest versions, entries, their descriptions, the arrays. ARGV: name, encoded entry, how many
-- chunks the arrays have, form of the entry, how many entries there may be, the version that must be the newest or ''.
-- Returns the version and 0; 0 and the newest version if that is not the expected one; -1 and 0 if there are too many
-- entries; or -2 and 0 if chunks are missing.
local last, newest, entries, about, arrays = unpack(KEYS)
local name, encoded, chunks, form, most, expected = unpack(ARGV)
-- A client asks again after a lost reply.
local done = redis.call('HGET', arrays, 'version')
if done then return {tonumber(done), 0} end
if redis.call('HLEN', arrays) ~= tonumber(chunks) then return {-2, 0} end
local present = redis.call('HGET', newest, name) or '0'
if expected ~= '' and present ~= expected then return {0, tonumber(present)} end
if redis.call('HLEN', entries) >= tonumber(most) then return {-1, 0} end
local version = redis.call('HINCRBY', last, name, 1)
local field = name .. '@' .. version
redis.call('HSET', entries, field, encoded)
redis.call('HSET', about, field, clock.milliseconds() .. ' ' .. string.match(arrays, '[^:]*$') .. ' ' .. form)
redis.call('HSET', newest, name, version)
redis.call('HSET', arrays, 'version', version)
redis.call('PERSIST', arrays)
return {version, 0}
