-- #include stream
-- #include record
-- Changes live parameters of a trace and orders its engine to apply the change.
-- KEYS: record, events, changes, operations. ARGV: trace, the prefix of an engine's control stream, operation, the
-- author packed, the version that is expected or '', the values packed, for how many seconds to remember the trace,
-- for how many to keep the control stream, the author's signature or '', then name, form and packed value of each
-- parameter. Returns 'accepted' and the version; 'unknown'; 'ended'; 'version' and the present one; 'undeclared' with
-- the name and all declared ones; 'form' with the name and the declared form; 'large' with the name and the greatest size;
-- or 'busy' with the limit's name.
local key, events, changes, operations = unpack(KEYS, 1, 4)
local trace, control, operation, author, expected, values, remember, control_seconds, proof = unpack(ARGV, 1, 9)
local FIRST, STEP = 10, 3
-- The engine's limits stand in the record; these hold until an engine runs the trace. VALUE_BYTES is an engine's, too.
local WAITING, PER_SECOND, VALUE_BYTES, VALUES = 10000, 10000, 2^20, 64

local function declared_names()
  local names = {}
  for _, field in ipairs(redis.call('HKEYS', key)) do
    if string.sub(field, 1, 2) == 'f:' then names[#names + 1] = string.sub(field, 3) end
  end
  table.sort(names)
  return table.concat(names, ', ')
end

local model, state, engine, present, second, count, most, most_a_second =
  unpack(redis.call('HMGET', key, 'm', 's', 'e', 'v', 'ls', 'ln', 'lw', 'lr'))
if not model then return {'unknown'} end
local accepted = redis.call('ZSCORE', operations, operation)
if accepted then return {'accepted', tonumber(accepted)} end
if state == 'closed' or stream.ended(events) then return {'ended'} end
if expected ~= '' and expected ~= present then return {'version', tonumber(present)} end
for index = FIRST, #ARGV, STEP do
  local name, form, packed = ARGV[index], ARGV[index + 1], ARGV[index + 2]
  if #packed > VALUE_BYTES or index >= FIRST + STEP * VALUES then return {'large', name, VALUE_BYTES} end
  local declared = redis.call('HGET', key, 'f:' .. name)
  if not declared then return {'undeclared', name, declared_names()} end
  if declared ~= form then return {'form', name, declared} end
end
if redis.call('ZCARD', changes) >= (tonumber(most) or WAITING) then return {'busy', 'steers-waiting'} end
local time = redis.call('TIME')
count = time[1] == second and record.count(count) + 1 or 1
if count > (tonumber(most_a_second) or PER_SECOND) then return {'busy', 'steers-per-s'} end
local version = redis.call('HINCRBY', key, 'v', 1)
-- An array: version, author, time in ms, values, and the signature if there is one.
local ARRAY_OF_4, ARRAY_OF_5, BYTES = '\148', '\149', '\197'
local milliseconds = time[1] * 1000 + math.floor(time[2] / 1000)
local change = cmsgpack.pack(version) .. author .. cmsgpack.pack(milliseconds) .. values
if proof == '' then
  change = ARRAY_OF_4 .. change
else
  local length = string.char(math.floor(#proof / 256), #proof % 256)
  change = ARRAY_OF_5 .. change .. BYTES .. length .. proof
end
local fields = {'ls', time[1], 'ln', count}
for index = FIRST, #ARGV, STEP do
  local name, packed = ARGV[index], ARGV[index + 2]
  fields[#fields + 1], fields[#fields + 2] = 'l:' .. name, packed
  if proof == '' then
    redis.call('HDEL', key, 'g:' .. name)
  else
    fields[#fields + 1], fields[#fields + 2] = 'g:' .. name, change
  end
end
redis.call('HSET', key, unpack(fields))
redis.call('ZADD', changes, version, change)
redis.call('EXPIRE', changes, remember)
record.remember(key, operations, operation, remember)
if engine then
  redis.call('XADD', control .. engine, '*', 'k', 'steer', 't', trace, 'd', change)
  redis.call('EXPIRE', control .. engine, control_seconds)
end
return {'accepted', version}
