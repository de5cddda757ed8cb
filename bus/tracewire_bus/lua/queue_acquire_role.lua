-- Gives a role of a queue to the first process that asks, until that process has not asked for some time.
-- KEYS: the role, whose value is the name of the process that has it. ARGV: the name of the process that asks, for how
-- many ms it gets the role. Returns whether it has the role.
local role = KEYS[1]
local name, milliseconds = unpack(ARGV)
local present = redis.call('GET', role)
if present and present ~= name then return 0 end
-- If its memory is full, Redis refuses a script at its first write, but never DEL. So DEL comes first.
redis.call('DEL', role)
redis.call('SET', role, name, 'PX', milliseconds)
return 1
