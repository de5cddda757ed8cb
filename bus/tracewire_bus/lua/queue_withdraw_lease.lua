-- #include queue
-- #include queue_entry
-- #include queue_leave
-- #include queue_holders
-- Gives the entries that wait under a lease to a holder, and returns all entries of that holder.
-- KEYS: the queue's. ARGV: lease, holder, the most bytes of data in all, the most bytes of data that an entry is
-- returned with.
local lease, holder, most, inline = unpack(ARGV)
for _, trace in ipairs(redis.call('SMEMBERS', queue.lease_key(lease))) do
  local entry = queue_entry.read(trace)
  if entry then
    queue_leave.order(trace, entry)
    redis.call('HSET', queue.taken, trace, holder)
  else
    -- An engine that had not taken the entry has settled it.
    queue_leave.lease(trace, lease)
  end
end
return queue_holders.reply_all(holder, tonumber(most), tonumber(inline))
