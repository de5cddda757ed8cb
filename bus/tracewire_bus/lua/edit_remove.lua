-- #include edits
-- Removes a standing intervention, and keeps the version and the signature of the last removal of each name.
-- KEYS: those of edit_install. ARGV: name, its version or '', operation, the author's signature or ''. Returns the new
-- generation; 0 if there is no such edit.
local state, entries, about, disabled, changes, removed = unpack(KEYS)
local name, version, operation, proof = unpack(ARGV)
local MOST_REMOVED = 256
local begun = edits.generation_of(changes, operation)
if begun then return begun end
local present = redis.call('HGET', about, name)
if not present or (version ~= '' and edits.version(present) ~= version) then return 0 end
for _, key in ipairs({entries, about, disabled, removed}) do redis.call('HDEL', key, name) end
if proof and proof ~= '' then
  local names = redis.call('HKEYS', removed)
  if #names >= MOST_REMOVED then redis.call('HDEL', removed, unpack(names)) end
  redis.call('HSET', removed, name, edits.version(present) .. ' ' .. proof)
end
return edits.begin_generation(state, changes, operation)
