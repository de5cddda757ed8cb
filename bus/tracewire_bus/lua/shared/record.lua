-- A trace's record: a hash beside its event stream. Its fields:
--   m model, c client, p lease, t deadline in ms, e engine, a number of attempts, s state
--   v version of the live parameters, l:NAME a live value packed, f:NAME its declared form
--   x the reason for which it was cancelled, xb by whom
--   z by whom it is paused, zn how often it was paused and resumed
--   zt when the pause ends in ms, zw the seconds that its author gave it, zo what the engine does then
--   lw how many changes may wait, lr how many may come a second; ls the second of the last one, ln how many came in it
--   r for how many seconds it is kept after its end
--   k the id of the key that has signed the submission
--   g:NAME the signed change that has set a live value, xg and zg the signatures of x and z
local record = {}
-- Most operations of one trace whose ids are remembered.
local OPERATIONS = 1000

-- A count in a record; 0 if it is malformed.
function record.count(raw)
  local number = tonumber(raw)
  return number and number >= 0 and number < 2^31 and math.floor(number) or 0
end

-- Remembers the id of an operation, so that a client that asks again after a lost reply gets the same reply.
function record.remember(key, operations, operation, seconds)
  redis.call('ZADD', operations, record.count(redis.call('HGET', key, 'v')), operation)
  redis.call('ZREMRANGEBYRANK', operations, 0, -1 - OPERATIONS)
  redis.call('EXPIRE', operations, seconds)
end
