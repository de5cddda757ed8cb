-- #include stream
-- #include clock
-- #include record
-- Lets an engine begin an attempt. The same engine may ask again for the same attempt.
-- KEYS: record, events, changes. ARGV: engine, for how many seconds to remember the record, attempt, for how many to
-- keep the trace after its end, how many changes of live parameters may wait, how many may come a second. Returns 'ended', 'overtaken', or the time in ms, the record, and the changes of live
-- parameters that no event has reported.
local key, events, changes = unpack(KEYS)
local engine, remember, attempt, retention, most, most_a_second = ARGV[1], ARGV[2], tonumber(ARGV[3]), unpack(ARGV, 4)
if stream.ended(events) then return 'ended' end
local attempts, last_engine = unpack(redis.call('HMGET', key, 'a', 'e'))
local last = record.count(attempts)
if attempt < last or attempt == last and last_engine ~= engine then return 'overtaken' end
redis.call('HSET', key, 'a', attempt, 'e', engine, 's', 'running', 'r', retention, 'lw', most, 'lr', most_a_second)
if redis.call('TTL', key) == -1 then redis.call('EXPIRE', key, remember) end
return {clock.milliseconds(), redis.call('HGETALL', key), redis.call('ZRANGE', changes, 0, -1)}
