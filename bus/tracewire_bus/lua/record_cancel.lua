-- #include stream
-- #include finish
-- Cancels a trace by an order to its engine. Ends it at once if no engine runs it, or if the caller forces that.
-- KEYS: record, events, operations. ARGV: trace, the prefix of every key with its hash tag, the prefix of an engine's
-- control stream, author, reason, schema, the encoded final before and after the number of its attempt, retention in
-- seconds, '1' to end it at once, for how many seconds to keep the control stream, operation, for how many seconds to
-- remember it, the author's signature or ''. Returns 'unknown'; 'ended'; 'asked' and the engine; or 'cancelled' and the model.
local key, events, operations = unpack(KEYS, 1, 3)
local trace, base, control, author, reason, schema, head, tail, retention, force, control_seconds, operation, remember,
  proof = unpack(ARGV)
-- If its memory is full, Redis refuses a script at its first write, but never HDEL. So HDEL comes first.
redis.call('HDEL', key, '')
local model, engine, cancelled = unpack(redis.call('HMGET', key, 'm', 'e', 'x'))
if not model then return {'unknown'} end
local asks_engine = engine and force ~= '1'
if redis.call('ZSCORE', operations, operation) then
  if asks_engine then return {'asked', engine} else return {'cancelled', model} end
end
if stream.ended(events) then return {'ended'} end
record.remember(key, operations, operation, remember)
-- A signed order replaces one that the engine may have refused.
local news = not cancelled or proof ~= ''
if news then redis.call('HSET', key, 'x', reason, 'xb', author, 'xg', proof) end
if asks_engine then
  -- A second order does no harm, and the first one may have been lost with a failed server.
  redis.call('XADD', control .. engine, '*', 'k', 'cancel', 't', trace, 'b', author, 'r', reason, 'g', proof)
  redis.call('EXPIRE', control .. engine, control_seconds)
  return {'asked', engine}
end
finish(base, trace, schema, head, tail, retention, 'cancelled', 'Cancelled')
return {'cancelled', model}
