-- #include queue
-- Adds an entry to the order. client_waits is the number of its client's entries that wait already. turn is the last
-- turn that was given before the call. Returns the last turn that was given after it.
local function queue_join(trace, entry, client_waits, turn)
  if entry.lost > 0 and entry.lost + 1 >= entry.tries then
    redis.call('ZADD', queue.suspects, entry.number, trace)
  else
    redis.call('ZADD', queue.client_key(entry.client), entry.priority, queue.member(trace, entry.number))
    if client_waits == 0 then
      turn = turn + 1
      redis.call('ZADD', queue.turns, turn, entry.client)
    end
  end
  if entry.lease ~= '' then
    redis.call('SADD', queue.lease_key(entry.lease), trace)
    redis.call('SADD', queue.leases, entry.lease)
  end
  return turn
end
