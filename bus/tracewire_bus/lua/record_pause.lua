-- #include clock
-- #include stream
-- #include record
-- Pauses or resumes a trace, and orders its engine to do so.
-- KEYS: record, events, operations. ARGV: trace, the prefix of an engine's control stream, 'pause' or 'resume',
-- author, for how many seconds to keep the control stream, operation, for how many seconds to remember it, the
-- author's signature or '', after how many seconds the pause ends or '', what the engine does then or '', and whose
-- pause to end or ''. Returns 'unknown', 'ended', 'so already' (nothing changes) or 'asked'.
local key, events, operations = unpack(KEYS, 1, 3)
local trace, control, action, author, control_seconds, operation, remember, proof, within, outcome, of = unpack(ARGV)
local model, engine, paused_by, state, before, due = unpack(redis.call('HMGET', key, 'm', 'e', 'z', 's', 'zg', 'zt'))
if not model then return 'unknown' end
if redis.call('ZSCORE', operations, operation) then return 'asked' end
if state == 'closed' or stream.ended(events) then return 'ended' end
-- A signed order replaces one without a signature, which the engine may have refused.
local may_differ = proof ~= '' and (before or '') == '' and redis.call('HEXISTS', key, 'zn') == 1
-- A pause with an end gives way to one without, and its author may move the end.
local may_last = action == 'pause' and due and (within == '' or paused_by == author)
if (action == 'pause') == (paused_by and true or false) and not may_differ and not may_last then return 'so already' end
if action == 'resume' and of ~= '' and paused_by ~= of then return 'so already' end
redis.call('HDEL', key, 'z', 'zt', 'zw', 'zo')
if action == 'pause' then redis.call('HSET', key, 'z', author) end
if within ~= '' then
  redis.call('HSET', key, 'zt', clock.milliseconds() + math.ceil(within * 1000), 'zw', within, 'zo', outcome)
end
redis.call('HSET', key, 'zg', proof)
record.remember(key, operations, operation, remember)
local number = redis.call('HINCRBY', key, 'zn', 1)
if engine then
  redis.call('XADD', control .. engine, '*', 'k', action, 't', trace, 'b', author, 'n', number, 'g', proof, 'w', within,
    'o', outcome, 'i', operation)
  redis.call('EXPIRE', control .. engine, control_seconds)
end
return 'asked'
