-- #include stream
-- #include finish
-- Ends the traces of one hash tag that are past their deadline, up to 100 a call: those that no engine runs, and
-- those whose engine has not ended them within the grace period.
-- KEYS: deadlines. ARGV: the prefix of every key with the hash tag, schema, the encoded final before and after the
-- number of its attempt, retention in seconds, the grace period in ms. Returns trace and model of each.
local deadlines = KEYS[1]
local base, schema, head, tail, retention, grace = unpack(ARGV)
local time, expired = clock.milliseconds(), {}
local due = redis.call('ZRANGEBYSCORE', deadlines, '-inf', time, 'WITHSCORES', 'LIMIT', 0, 100)
for index = 1, #due, 2 do
  local trace, at = due[index], tonumber(due[index + 1])
  local model, engine = unpack(redis.call('HMGET', base .. 'trace:' .. trace, 'm', 'e'))
  if not model or stream.ended(base .. 'events:' .. trace) then
    redis.call('ZREM', deadlines, trace)
  elseif not engine or time >= at + grace then
    finish(base, trace, schema, head, tail, retention, 'expired', 'DeadlineExceeded')
    redis.call('ZREM', deadlines, trace)
    expired[#expired + 1] = trace
    expired[#expired + 1] = model
  end
end
return expired
