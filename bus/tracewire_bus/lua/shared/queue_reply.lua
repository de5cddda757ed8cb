-- #include queue
-- #include queue_leave
-- Claims entries for engines, and makes the replies that hold them.
local queue_reply = {}
local call = redis.call

-- Gives an entry to an engine.
function queue_reply.claim(trace, entry, engine)
  queue_leave.lease(trace, entry.lease)
  entry.attempt = entry.attempt + 1
  queue.write(trace, entry)
  call('HSET', queue.taken, trace, engine)
end

-- The reply for an entry, with its data if with_data.
function queue_reply.entry(trace, entry, with_data)
  return {
    trace, entry.schema, entry.queued_us, with_data and call('HGET', queue.data, trace),
    entry.attempt, entry.tries, entry.lost, entry.reason
  }
end
