-- #include stream
-- #include clock
-- #include record
-- Changes live parameters of a trace and orders its engine to apply the change.
-- KEYS: record, events, changes, operations. ARGV: trace, the prefix of an engine's control stream, operation, the
-- author packed, the version that is expected or '', the values packed, how many changes may wait, for how many
-- seconds to remember the trace, for how many to keep the control stream, then name, form and packed value of each
-- parameter. Returns 'accepted' and the version; 'unknown'; 'ended'; 'version' and the present one; 'undeclared' with
-- the name and all declared ones; 'form' with the name and the declared form; or 'busy'.
local key, events, changes, operations = unpack(KEYS, 1, 4)
local trace, control, operation, author, expected, values, most, remember, control_seconds = unpack(ARGV, 1, 9)
local FIRST, STEP = 10, 3

local function declared_names()
  local names = {}
  for _, field in ipairs(redis.call('HKEYS', key)) do
    if string.sub(field, 1, 2) == 'f:' then names[#names + 1] = string.sub(field, 3) end
  end
  table.sort(names)
  return table.concat(names, ', ')
end

local model, state, engine, present = unpack(redis.call('HMGET', key, 'm', 's', 'e', 'v'))
if not model then return {'unknown'} end
local accepted = redis.call('ZSCORE', operations, operation)
if accepted then return {'accepted', tonumber(accepted)} end
if state == 'closed' or stream.ended(events) then return {'ended'} end
if expected ~= '' and expected ~= present then return {'version', tonumber(present)} end
for index = FIRST, #ARGV, STEP do
  local name, form = ARGV[index], ARGV[index + 1]
  local declared = redis.call('HGET', key, 'f:' .. name)
  if not declared then return {'undeclared', name, declared_names()} end
  if declared ~= form then return {'form', name, declared} end
end
if redis.call('ZCARD', changes) >= tonumber(most) then return {'busy'} end
local version = redis.call('HINCRBY', key, 'v', 1)
for index = FIRST, #ARGV, STEP do
  local name, packed = ARGV[index], ARGV[index + 2]
  redis.call('HSET', key, 'l:' .. name, packed)
end
-- An array of four: version, author, time in ms, values.
local ARRAY_OF_4 = '\148'
local change = ARRAY_OF_4 .. cmsgpack.pack(version) .. author .. cmsgpack.pack(clock.milliseconds()) .. values
redis.call('ZADD', changes, version, change)
redis.call('EXPIRE', changes, remember)
record.remember(key, operations, operation, remember)
if engine then
  redis.call('XADD', control .. engine, '*', 'k', 'steer', 't', trace, 'd', change)
  redis.call('EXPIRE', control .. engine, control_seconds)
end
return {'accepted', version}
