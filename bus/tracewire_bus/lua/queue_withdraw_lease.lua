-- #include queue
-- Gives the entries that wait under a lease to a holder, and replies all that it has.
-- KEYS: the queue's. ARGV: lease, holder, most bytes in all, most bytes of data that is replied with its entry.
local lease, holder, most, inline = unpack(ARGV)
for _, trace in ipairs(redis.call('SMEMBERS', queue.lease_key(lease))) do
  local entry = queue.entry(trace)
  if entry then
    queue.leave(trace, entry)
    redis.call('HSET', queue.taken, trace, holder)
  else
    -- It was settled by an engine that had not taken it.
    queue.leave_lease(trace, lease)
  end
end
return queue.reply_all(holder, tonumber(most), tonumber(inline))
