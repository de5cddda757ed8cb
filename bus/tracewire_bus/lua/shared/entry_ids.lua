-- Ids of a stream's entries.
local entry_ids = {}

-- The id of the last entry that was ever added; '0-0' if there is none.
function entry_ids.last(events)
  if redis.call('EXISTS', events) == 0 then return '0-0' end
  local info = redis.call('XINFO', 'STREAM', events)
  for index = 1, #info, 2 do
    if info[index] == 'last-generated-id' then return info[index + 1] end
  end
  return '0-0'
end

-- The two parts of an entry's id, as strings.
function entry_ids.parts(id)
  local dash = string.find(id, '-', 1, true)
  return string.sub(id, 1, dash - 1), string.sub(id, dash + 1)
end
