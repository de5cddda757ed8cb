-- #include queue
-- #include queue_entry
-- #include queue_leave
-- #include queue_holders
-- Gives the entries that wait under a lease to a holder, and replies all that it has.
-- KEYS: the queue's. ARGV: lease, holder, most bytes in all, most bytes of data that is replied with its entry.
local lease, holder, most, inline = unpack(ARGV)
for _, trace in ipairs(redis.call('SMEMBERS', queue.lease_key(lease))) do
  local entry = queue_entry.read(trace)
  if entry then
    queue_leave.order(trace, entry)
    redis.call('HSET', queue.taken, trace, holder)
  else
    -- It was settled by an engine that had not taken it.
    queue_leave.lease(trace, lease)
  end
end
return queue_holders.reply_all(holder, tonumber(most), tonumber(inline))
