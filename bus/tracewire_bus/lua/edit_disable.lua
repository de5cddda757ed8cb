-- #include edits
-- Disables a standing intervention that an engine cannot run.
-- KEYS: those of edit_install. ARGV: name, version, reason, operation. Returns the new generation; 0
-- if there is no such edit, or if it is disabled already.
local state, _, about, disabled, changes = unpack(KEYS)
local name, version, reason, operation = unpack(ARGV)
local begun = edits.generation_of(changes, operation)
if begun then return begun end
local present = redis.call('HGET', about, name)
if not present or edits.version(present) ~= version then return 0 end
if redis.call('HSETNX', disabled, name, reason) == 0 then return 0 end
return edits.begin_generation(state, changes, operation)
