-- #include queue
-- #include queue_entry
-- Gives a taken entry to the engine that runs its trace, which has it by another attempt perhaps.
-- KEYS: the queue's, the holders. ARGV: trace, its holder, its attempt, the other engine, that one's attempt. Returns
-- whether the holder had the entry.
local call = redis.call
local holders = KEYS[10]
local trace, holder, attempt, engine, number = unpack(ARGV)
-- If its memory is full, Redis refuses a script at its first write, but never HDEL. So HDEL comes first.
call('HDEL', queue.taken, '')
local entry = call('HGET', queue.taken, trace) == holder and queue_entry.read(trace)
if not entry or entry.attempt ~= tonumber(attempt) then return 0 end
entry.attempt = tonumber(number)
queue.write(trace, entry)
call('HSET', queue.taken, trace, engine)
call('SADD', holders, engine)
return 1
