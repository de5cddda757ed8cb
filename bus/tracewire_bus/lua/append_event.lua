-- #include lifecycle
-- #include stream
-- #include append
-- Appends an event and does what goes with it, which must not happen where the event is refused: for its id, because
-- a later attempt has begun, or because the event before it is not there. With '' for the schema the event stands
-- there already, and only what goes with it is done.
-- KEYS: events, blobs, record, changes, operations, deadlines, snapshot, lifecycle stream, finished traces, their
-- sizes. ARGV: id, schema, encoded event, for how many seconds to keep the trace from now on or '', '' (not a final),
-- the version of the live parameters that the event reports or '', attempt, trace, id of the event before it or '',
-- then the fields of the lifecycle entry, if there is one. Returns the id.
local events, blobs, key, changes = unpack(KEYS, 1, 4)
local lifecycle_stream = KEYS[8]
local id, schema, data, keep_seconds, _, version, attempt, _, previous = unpack(ARGV, 1, 9)
-- A full Redis refuses a script at its first write. HDEL is never refused.
redis.call('HDEL', key, '')
if schema ~= '' then
  local refusal = append(events, key, id, schema, data, attempt, previous)
  if refusal then return refusal end
elseif stream.ended(events) then
  -- The trace has ended since the event was appended: its keys must not be kept for longer.
  return id
end
-- These changes of live parameters have been reported by now.
if version ~= '' then redis.call('ZREMRANGEBYSCORE', changes, '-inf', version) end
if keep_seconds ~= '' then
  redis.call('EXPIRE', events, keep_seconds)
  redis.call('EXPIRE', blobs, keep_seconds)
end
if ARGV[10] then
  lifecycle.publish(lifecycle_stream, 'c', redis.call('HGET', key, 'c') or '', unpack(ARGV, 10))
end
return id
