-- The standing interventions of a model. A hash has a description of each by its name: the text "POSITION VERSION
-- INSTALLED_MS SCHEMA".
local edits = {}
-- About how many operations of one model are remembered.
local OPERATIONS = 100

function edits.version(about)
  return about and string.match(about, '^%d+ (%d+) ') or '0'
end

-- Begins a new generation and returns its number.
function edits.begin_generation(state, changes, operation)
  local generation = redis.call('HINCRBY', state, 'generation', 1)
  redis.call('XADD', changes, 'MAXLEN', '~', OPERATIONS, '*', 'g', generation, 'o', operation)
  return generation
end

-- The generation that this operation began, if a client asks again after a lost reply; else nothing.
function edits.generation_of(changes, operation)
  for _, entry in ipairs(redis.call('XREVRANGE', changes, '+', '-', 'COUNT', OPERATIONS)) do
    local generation, by = entry[2][2], entry[2][4]
    if by == operation then return tonumber(generation) end
  end
end
