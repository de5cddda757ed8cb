-- #include queue
-- Takes entries out of the order in which they wait.
local queue_leave = {}
local call = redis.call

function queue_leave.lease(trace, lease)
  if lease == '' then return end
  local key = queue.lease_key(lease)
  call('SREM', key, trace)
  if call('EXISTS', key) == 0 then call('SREM', queue.leases, lease) end
end

-- Clears the state of a queue in which no entry waits.
function queue_leave.nothing()
  call('DEL', queue.bell)
  call('HDEL', queue.state, 'since')
end

-- Removes a waiting entry from the order.
function queue_leave.order(trace, entry)
  local client = entry.client
  local key = queue.client_key(client)
  call('ZREM', key, queue.member(trace, entry.number))
  call('ZREM', queue.suspects, trace)
  if call('EXISTS', key) == 0 then call('ZREM', queue.turns, client) end
  queue_leave.lease(trace, entry.lease)
  local waiting = queue.whole(call('HGET', queue.state, 'waiting'), 0) - 1
  call('HSET', queue.state, 'waiting', waiting)
  if waiting <= 0 then queue_leave.nothing() end
end
