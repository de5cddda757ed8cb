-- Undoes a change of live parameters that the trace's engine has refused.
-- KEYS: record, changes. ARGV: the version of the change, then for each of its parameters the name, the packed value
-- that the change has set, the packed value that holds, and the signed change that has set that one or ''.
local key, changes = unpack(KEYS)
local version = ARGV[1]
local FIRST, STEP = 2, 4
redis.call('ZREMRANGEBYSCORE', changes, version, version)
for index = FIRST, #ARGV, STEP do
  local name, refused, value, proof = unpack(ARGV, index, index + STEP - 1)
  -- A later change may have set it since.
  if redis.call('HGET', key, 'l:' .. name) == refused then
    redis.call('HSET', key, 'l:' .. name, value)
    if proof == '' then redis.call('HDEL', key, 'g:' .. name) else redis.call('HSET', key, 'g:' .. name, proof) end
  end
end
return 1
