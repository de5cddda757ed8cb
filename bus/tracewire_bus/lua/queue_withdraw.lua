-- #include queue
-- #include queue_entry
-- #include queue_leave
-- Removes a waiting entry. A client that asks again after a lost reply gets the same reply.
-- KEYS: the queue's, the trace's mark. ARGV: trace, for how many seconds to remember it. Returns whether the entry
-- was withdrawn.
local submitted = KEYS[10]
local trace, remember = unpack(ARGV)
local entry = queue_entry.read(trace)
if not entry then return redis.call('GET', submitted) == 'withdrawn' and 1 or 0 end
if redis.call('HEXISTS', queue.taken, trace) == 1 then return 0 end
queue_leave.order(trace, entry)
redis.call('HDEL', queue.data, trace)
redis.call('HDEL', queue.entries, trace)
redis.call('SET', submitted, 'withdrawn', 'EX', remember)
return 1
