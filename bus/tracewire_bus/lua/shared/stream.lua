-- A trace's event stream.
local stream = {}
-- The id of every trace's final event, the greatest of all.
local FINAL_ID = '18446744073709551615-18446744073709551615'
stream.FINAL_ID = FINAL_ID

-- The id of the last entry that was ever added; '0-0' if there is none.
function stream.last_id(events)
  if redis.call('EXISTS', events) == 0 then return '0-0' end
  local info = redis.call('XINFO', 'STREAM', events)
  for index = 1, #info, 2 do
    if info[index] == 'last-generated-id' then return info[index + 1] end
  end
  return '0-0'
end

-- Whether the last entry of the stream is the one of this id; true where id is ''.
function stream.ends_with(events, id)
  if id == '' then return true end
  local last = redis.call('XREVRANGE', events, '+', '-', 'COUNT', 1)[1]
  return last and last[1] == id
end

-- Refuses whatever would come after the attempt's present end: it would leave a hole.
function stream.close_attempt(events, attempt, call)
  return call('XSETID', events, attempt .. '-18446744073709551615')
end

-- The parts of an entry's id, as texts.
function stream.parts(id)
  local dash = string.find(id, '-', 1, true)
  return string.sub(id, 1, dash - 1), string.sub(id, dash + 1)
end

-- Whether the trace has ended.
function stream.ended(events)
  return #redis.call('XRANGE', events, FINAL_ID, FINAL_ID) > 0
end
