-- #include queue
-- Reads entries of a queue.
local queue_entry = {}
local whole = queue.whole

local function text(value)
  if type(value) == 'number' then return tostring(value) end
  return type(value) == 'string' and value or ''
end

-- The entry of a trace, or false. A malformed field reads as its default. The engine that takes such an entry refuses
-- it.
function queue_entry.read(trace)
  local packed = redis.call('HGET', queue.entries, trace)
  if not packed then return false end
  local fine, fields = pcall(cmsgpack.unpack, packed)
  if not fine or type(fields) ~= 'table' then fields = {} end
  return {
    schema = text(fields[1]), queued_us = text(fields[2]), client = text(fields[3]), priority = whole(fields[4], 0),
    lease = text(fields[5]), number = whole(fields[6], 0), bytes = whole(fields[7], 0),
    attempt = math.max(0, whole(fields[8], 0)), tries = whole(fields[9], 1), lost = whole(fields[10], 0),
    reason = text(fields[11])
  }
end
