-- Removes a reader from a watch group, if it has acknowledged all that it was given.
-- KEYS: lifecycle stream. ARGV: group, reader. Returns whether it was removed.
local stream = KEYS[1]
local group, reader = unpack(ARGV)
if #redis.call('XPENDING', stream, group, '-', '+', 1, reader) > 0 then return 0 end
redis.call('XGROUP', 'DELCONSUMER', stream, group, reader)
return 1
