-- Makes uploaded chunks a trace's snapshot, and removes the events that it covers from the stream. A second run
-- changes nothing. A snapshot's fields: a attempt, s number of the last event in it, v schema, n number of chunks,
-- g their name; then the chunks, as NAME:NUMBER.
-- KEYS: snapshot, events, record. ARGV: attempt, number of the last event, schema, number of chunks, their name.
-- Returns 'gone' (the trace has expired), 'overtaken' (a later attempt has begun), 'older' (the present snapshot
-- holds more), or 'trimmed'.
local snapshot, events, key = unpack(KEYS)
local attempt, number, schema, chunks, name = unpack(ARGV)
-- If its memory is full, Redis refuses a script at its first write, but never HDEL. So HDEL comes first.
redis.call('HDEL', snapshot, '')
local left = redis.call('TTL', events)
if left == -2 then
  redis.call('DEL', snapshot)
  return 'gone'
end
local present_attempt, present_number, present_name = unpack(redis.call('HMGET', snapshot, 'a', 's', 'g'))
present_attempt, present_number = tonumber(present_attempt), tonumber(present_number) or 0

local function holds_more()
  if present_name == name or not present_attempt then return false end
  if present_attempt ~= tonumber(attempt) then return present_attempt > tonumber(attempt) end
  return present_number >= tonumber(number)
end

local reply = 'trimmed'
if tonumber(attempt) < (tonumber(redis.call('HGET', key, 'a')) or 0) then
  reply = 'overtaken'
elseif holds_more() then
  reply = 'older'
else
  redis.call('HSET', snapshot, 'a', attempt, 's', number, 'v', schema, 'n', chunks, 'g', name)
  redis.call('XTRIM', events, 'MINID', attempt .. '-' .. number)
  present_name = name
end
for _, field in ipairs(redis.call('HKEYS', snapshot)) do
  local owner = string.match(field, '^(.+):%d+$')
  if owner and owner ~= present_name then redis.call('HDEL', snapshot, field) end
end
if left >= 0 then redis.call('EXPIRE', snapshot, left) end
return reply
