-- #include lifecycle
-- #include stream
-- #include append
-- Appends an event, prolongs the trace's keys, removes the changes of live parameters that the event reports, and
-- publishes the lifecycle entry. Does none of this if the event is refused: for its id, because a later attempt has
-- begun, or because the event before it is missing. With '' for the schema the stream has the event already, and the
-- script does only the rest.
-- KEYS: events, blobs, record, changes, operations, deadlines, snapshot, lifecycle stream, finished traces, their
-- sizes. ARGV: id, schema, encoded event, for how many seconds to keep the trace or '', '' (not a final),
-- the version of the live parameters that the event reports or '', attempt, trace, id of the event before it or '',
-- then the fields of the lifecycle entry, if there is one. Returns the id.
local events, blobs, key, changes = unpack(KEYS, 1, 4)
local lifecycle_stream = KEYS[8]
local id, schema, data, keep_seconds, _, version, attempt, _, previous = unpack(ARGV, 1, 9)
-- If its memory is full, Redis refuses a script at its first write, but never HDEL. So HDEL comes first.
redis.call('HDEL', key, '')
if schema ~= '' then
  local refusal = append(events, key, id, schema, data, attempt, previous)
  if refusal then return refusal end
elseif stream.ended(events) then
  -- The trace has ended since the event was appended: its keys must not be kept longer.
  return id
end
-- This event and earlier ones report these changes of live parameters.
if version ~= '' then redis.call('ZREMRANGEBYSCORE', changes, '-inf', version) end
if keep_seconds ~= '' then
  redis.call('EXPIRE', events, keep_seconds)
  redis.call('EXPIRE', blobs, keep_seconds)
end
if ARGV[10] then
  lifecycle.publish(lifecycle_stream, 'c', redis.call('HGET', key, 'c') or '', unpack(ARGV, 10))
end
return id
