-- A trace's event stream.
local stream = {}
-- The id of every trace's final event, the greatest of all.
local FINAL_ID = '18446744073709551615-18446744073709551615'
stream.FINAL_ID = FINAL_ID

-- Whether the last entry of the stream is the one of this id; true where id is ''.
function stream.ends_with(events, id)
  if id == '' then return true end
  local last = redis.call('XREVRANGE', events, '+', '-', 'COUNT', 1)[1]
  return last and last[1] == id
end

-- Has Redis refuse further events of the attempt, which would leave a hole in the stream.
function stream.close_attempt(events, attempt, call)
  return call('XSETID', events, attempt .. '-18446744073709551615')
end

-- Whether the trace has ended.
function stream.ended(events)
  return #redis.call('XRANGE', events, FINAL_ID, FINAL_ID) > 0
end
