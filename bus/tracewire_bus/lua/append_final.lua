-- #include lifecycle
-- #include append
-- #include finished
-- Appends a trace's final event and ends the trace. Keys, arguments and reply are those of append_event.
local events, blobs, key, changes, operations, deadlines, snapshot, lifecycle_stream, list, sizes = unpack(KEYS)
local id, schema, data, retention, _, version, attempt, trace, previous = unpack(ARGV, 1, 9)
-- If its memory is full, Redis refuses a script at its first write, but never HDEL. So HDEL comes first.
redis.call('HDEL', key, '')
if schema ~= '' then
  local refusal = append(events, key, id, schema, data, attempt, previous)
  if refusal then return refusal end
end
-- The stream reports these changes of live parameters.
if version ~= '' then redis.call('ZREMRANGEBYSCORE', changes, '-inf', version) end
for _, name in ipairs({events, blobs, key, snapshot}) do redis.call('EXPIRE', name, retention) end
redis.call('DEL', changes)
-- A controller that asks again after a lost reply finds its operation for a minute more.
redis.call('EXPIRE', operations, 60)
redis.call('ZREM', deadlines, trace)
finished.add(trace, retention, list, sizes, events, blobs, key, snapshot)
if ARGV[10] then
  lifecycle.publish(lifecycle_stream, 'c', redis.call('HGET', key, 'c') or '', unpack(ARGV, 10))
end
return id
