-- #include entry_ids
-- #include lifecycle
-- Appends again the last events that a server acknowledged and then lost, with their lifecycle entries.
-- KEYS: events, record, lifecycle stream. ARGV: schema, id of the last event before them or '' if they are all that
-- the writer has appended, '1' if the last of them is a final (they are appended then even if others before them are
-- missing), attempt, then of each event its id, its data and its packed lifecycle fields or ''. Returns how many
-- events it appended; 'ahead' if the stream has later events; 'fenced' if the stream has another writer's event in
-- their place or a later attempt has begun; 'gap' if events before them are missing.
local events, key, lifecycle_stream = unpack(KEYS)
local schema, base, whole, attempt = unpack(ARGV, 1, 4)
local FIRST, STEP = 5, 3

local function less(one, other)
  if #one ~= #other then return #one < #other end
  return one < other
end

local function before(one, other)
  local one_attempt, one_number = entry_ids.parts(one)
  local other_attempt, other_number = entry_ids.parts(other)
  if one_attempt ~= other_attempt then return less(one_attempt, other_attempt) end
  return less(one_number, other_number)
end

local function data_of(fields)
  for index = 1, #fields, 2 do
    if fields[index] == 'd' then return fields[index + 1] end
  end
end

-- If its memory is full, Redis refuses a script at its first write, but never HDEL. So HDEL comes first.
redis.call('HDEL', key, '')
local last_attempt, client = unpack(redis.call('HMGET', key, 'a', 'c'))
if whole == '1' and (tonumber(last_attempt) or 0) > tonumber(attempt) then return 'fenced' end
local last = entry_ids.last(events)
local from, greatest = nil, base
for index = FIRST, #ARGV, STEP do
  greatest = ARGV[index]
  if greatest == last then
    local entry = redis.call('XRANGE', events, last, last)[1]
    if entry and data_of(entry[2]) ~= ARGV[index + 1] then return 'fenced' end
    from = index + STEP
  end
end
if not from then
  local first = ARGV[FIRST]
  if base ~= '' and last == base then
    from = FIRST
  elseif greatest == '' or before(greatest, last) then
    return 'ahead'
  elseif base == '' and (not first or before(last, first)) then
    from = FIRST
  elseif whole == '1' and before(last, first) then
    from = FIRST
  elseif not first or before(last, first) then
    return 'gap'
  else
    return 'fenced'
  end
end
for index = from, #ARGV, STEP do
  local id, data, fields = unpack(ARGV, index, index + 2)
  redis.call('XADD', events, id, 'v', schema, 'd', data)
  if fields ~= '' then lifecycle.publish(lifecycle_stream, 'c', client or '', unpack(cmsgpack.unpack(fields))) end
end
return (#ARGV + 1 - from) / STEP
