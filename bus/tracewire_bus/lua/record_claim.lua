-- #include stream
-- #include record
-- Writes again which engine runs an attempt, to a server that may have lost it. A second run changes nothing.
-- KEYS: record, events. ARGV: attempt, engine, state, the version of the live parameters that the engine has, for how
-- many seconds to remember the record, by whom the trace is paused or '', how many pauses and resumptions the engine
-- has seen, then name and packed value of each live parameter. Returns whether the attempt is the engine's.
local key, events = unpack(KEYS)
local attempt, engine, state, version, remember, paused_by, pauses = unpack(ARGV, 1, 7)
attempt = tonumber(attempt)
-- If its memory is full, Redis refuses a script at its first write, but never HDEL. So HDEL comes first.
redis.call('HDEL', key, '')
if stream.ended(events) then return 0 end
local attempts, last_engine, known_version, known_pauses = unpack(redis.call('HMGET', key, 'a', 'e', 'v', 'zn'))
local last = record.count(attempts)
if attempt < last or attempt == last and last_engine ~= engine then return 0 end
redis.call('HSET', key, 'a', attempt, 'e', engine, 's', state)
if (tonumber(known_version) or 0) < tonumber(version) then
  redis.call('HSET', key, 'v', version)
  for index = 8, #ARGV, 2 do redis.call('HSET', key, 'l:' .. ARGV[index], ARGV[index + 1]) end
end
if (tonumber(known_pauses) or 0) < tonumber(pauses) then
  redis.call('HSET', key, 'zn', pauses)
  if paused_by ~= '' then redis.call('HSET', key, 'z', paused_by) else redis.call('HDEL', key, 'z') end
end
if redis.call('TTL', key) == -1 then redis.call('EXPIRE', key, remember) end
return 1
