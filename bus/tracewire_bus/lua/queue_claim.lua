-- #include queue
-- #include queue_entry
-- #include queue_leave
-- Writes again that an engine runs an entry, to a server that may have lost the entry in part or whole.
-- KEYS: the queue's, the trace's mark, the holders. ARGV: trace, engine, attempt, schema, when it was queued in
-- microseconds, client, priority, lease, tries, engines lost, reason of the last loss, for how many seconds to
-- remember the trace, the encoded submission. Returns whether the entry is the engine's.
local call = redis.call
local submitted, holders = KEYS[10], KEYS[11]
local trace, engine, attempt, schema, queued_us, client, priority, lease, tries, lost, reason, remember, data =
  unpack(ARGV)
attempt = tonumber(attempt)
-- If its memory is full, Redis refuses a script at its first write, but never HDEL. So HDEL comes first.
call('HDEL', queue.taken, '')
local holder, entry = call('HGET', queue.taken, trace), queue_entry.read(trace)
if holder and holder ~= engine then return 0 end
if entry and entry.attempt > attempt then return 0 end
if not entry then
  if holder then return 0 end
  local number = queue.whole(call('HGET', queue.state, 'number'), 0) + 1
  call('HSET', queue.state, 'number', number)
  entry = {
    schema = schema, queued_us = queued_us, client = client, priority = priority, lease = lease, number = number,
    bytes = #data, tries = tonumber(tries), lost = tonumber(lost), reason = reason
  }
  call('HSET', queue.data, trace, data)
elseif not holder then
  queue_leave.order(trace, entry)
end
entry.attempt = attempt
call('SET', submitted, 1, 'EX', remember)
queue.write(trace, entry)
call('HSET', queue.taken, trace, engine)
call('SADD', holders, engine)
return 1
