-- #include clock
-- #include edits
-- Installs a standing intervention, or replaces the one of its name.
-- KEYS: state, encoded edits, their descriptions, disabled edits, changes, signatures of removals. ARGV: name, encoded edit, the version that
-- it replaces or '', schema, how many edits a model may have, operation. Returns the new version and 0; 0 and the
-- installed version if that is not the expected one; or -1 and 0 if the model has too many edits.
local state, entries, about, disabled, changes = unpack(KEYS, 1, 5)
local name, encoded, expected, schema, most, operation = unpack(ARGV)
local begun = edits.generation_of(changes, operation)
if begun then return {begun, 0} end
local present = redis.call('HGET', about, name)
if expected ~= '' and edits.version(present) ~= expected then return {0, tonumber(edits.version(present))} end
if not present and #redis.call('HKEYS', about) >= tonumber(most) then return {-1, 0} end
local generation = edits.begin_generation(state, changes, operation)
local position = present and string.match(present, '^(%d+) ') or generation
redis.call('HSET', entries, name, encoded)
redis.call('HSET', about, name, position .. ' ' .. generation .. ' ' .. clock.milliseconds() .. ' ' .. schema)
redis.call('HDEL', disabled, name)
return {generation, 0}
