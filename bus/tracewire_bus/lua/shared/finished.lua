-- #include clock
-- The finished traces of one hash tag: a sorted set of trace ids by the time at which each expires, and a hash of the
-- bytes that each takes. The sum of these bytes stands in the hash under the name '', which no trace has.
local finished = {}
local SUM = ''

local function add_to_sum(sizes, bytes)
  -- A sum that is not a number begins anew.
  local sum = tonumber(redis.call('HGET', sizes, SUM))
  if not (sum and sum >= 0 and sum < 2^53) then sum = 0 end
  redis.call('HSET', sizes, SUM, string.format('%.0f', math.max(0, sum + bytes)))
end

function finished.sum(sizes)
  return tonumber(redis.call('HGET', sizes, SUM)) or 0
end

function finished.remove(list, sizes, trace)
  local bytes = redis.call('HGET', sizes, trace)
  redis.call('ZREM', list, trace)
  if bytes then
    add_to_sum(sizes, -(tonumber(bytes) or 0))
    redis.call('HDEL', sizes, trace)
  end
end

function finished.remove_expired(list, sizes, most)
  for _, trace in ipairs(redis.call('ZRANGEBYSCORE', list, '-inf', clock.milliseconds(), 'LIMIT', 0, most)) do
    finished.remove(list, sizes, trace)
  end
end

-- Enters a trace that has just ended. The arguments after sizes are all keys that are kept of the trace; the caller
-- has given them their expiry.
function finished.add(trace, retention, list, sizes, ...)
  local bytes = 0
  for _, key in ipairs({...}) do
    -- For a Redis user without the right to MEMORY USAGE a key counts as 0 bytes. An engine that bounds bytes has it.
    local size = redis.pcall('MEMORY', 'USAGE', key, 'SAMPLES', 0)
    if type(size) == 'number' then bytes = bytes + size end
  end
  -- Each trace that is added removes some that have expired, so that the list does not outgrow what Redis keeps.
  finished.remove_expired(list, sizes, 4)
  finished.remove(list, sizes, trace)
  redis.call('HSET', sizes, trace, bytes)
  add_to_sum(sizes, bytes)
  redis.call('ZADD', list, clock.milliseconds() + retention * 1000, trace)
  for _, key in ipairs({list, sizes}) do
    if redis.call('TTL', key) < tonumber(retention) then redis.call('EXPIRE', key, retention) end
  end
end
