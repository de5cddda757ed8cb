-- Gives a role of a queue to the one that asks first, until it has not asked for some time.
-- KEYS: the name that has the role. ARGV: the name that asks, for how many ms it has the role. Returns whether it has
-- it.
local role = KEYS[1]
local name, milliseconds = unpack(ARGV)
local present = redis.call('GET', role)
if present and present ~= name then return 0 end
-- A full Redis refuses a script at its first write. DEL is never refused.
redis.call('DEL', role)
redis.call('SET', role, name, 'PX', milliseconds)
return 1
