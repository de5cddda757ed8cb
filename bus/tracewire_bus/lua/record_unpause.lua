-- #include record
-- Ends a pause whose time is over, for the engine that runs the trace.
-- KEYS: record. ARGV: the number of the pause. Returns the number of the resumption; 0 if another order came since.
local key = KEYS[1]
local number = ARGV[1]
local present, paused_by = unpack(redis.call('HMGET', key, 'zn', 'z'))
if not paused_by or tostring(record.count(present)) ~= number then return 0 end
redis.call('HDEL', key, 'z', 'zt', 'zw', 'zo', 'zg')
return redis.call('HINCRBY', key, 'zn', 1)
