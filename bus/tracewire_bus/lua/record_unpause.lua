-- #include record
-- Ends a pause whose time is over, for the engine that runs the trace.
-- KEYS: record. ARGV: the number of the pause, and '1' if the trace is to be cancelled: then the trace is closed to
-- further orders, and stays paused for an engine that takes it over. Returns the number of the resumption, or of the pause
-- if the trace is to be cancelled; 0 if another order came since. A second call has the same result.
local key = KEYS[1]
local number, cancels = unpack(ARGV)
local present, paused_by, ended = unpack(redis.call('HMGET', key, 'zn', 'z', 'zu'))
present = record.count(present)
if not paused_by and ended == number and present == tonumber(number) + 1 then return present end
if not paused_by or present ~= tonumber(number) then return 0 end
if cancels == '1' then
  redis.call('HDEL', key, '')
  redis.call('HSET', key, 's', 'closed')
  return present
end
redis.call('HDEL', key, 'z', 'zt', 'zw', 'zo', 'zg')
redis.call('HSET', key, 'zu', number)
return redis.call('HINCRBY', key, 'zn', 1)
