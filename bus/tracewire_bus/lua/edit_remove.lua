-- #include edits
-- Removes a standing intervention.
-- KEYS: those of edit_install. ARGV: name, its version or '', operation. Returns the new generation; 0 if there
-- is no such edit.
local state, entries, about, disabled, changes = unpack(KEYS)
local name, version, operation = unpack(ARGV)
local begun = edits.generation_of(changes, operation)
if begun then return begun end
local present = redis.call('HGET', about, name)
if not present or (version ~= '' and edits.version(present) ~= version) then return 0 end
for _, key in ipairs({entries, about, disabled}) do redis.call('HDEL', key, name) end
return edits.begin_generation(state, changes, operation)
