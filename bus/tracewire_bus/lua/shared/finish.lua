-- #include stream
-- #include record
-- #include lifecycle
-- #include finished
-- Ends a trace without its engine. The final event has the number of the attempt after the last one. base is the
-- prefix of every key with the trace's hash tag. head and tail are the encoded final event before and after the
-- number of its attempt.
local function finish(base, trace, schema, head, tail, retention, status, error_type)
  local key, events = base .. 'trace:' .. trace, base .. 'events:' .. trace
  local attempt = record.count(redis.call('HGET', key, 'a')) + 1
  -- The trace is kept for as long as the engines of its model keep theirs, if the record says how long.
  local own_retention = tonumber(redis.call('HGET', key, 'r'))
  if own_retention and own_retention >= 1 and own_retention <= 1e9 then retention = math.floor(own_retention) end
  -- If its memory is full, Redis refuses a script at its first write, but never HDEL. So HDEL comes first.
  redis.call('HDEL', key, '')
  redis.call('XADD', events, stream.FINAL_ID, 'v', schema, 'd', head .. struct.pack('>I4', attempt) .. tail)
  local kept = {events, key, base .. 'blobs:' .. trace, base .. 'snapshot:' .. trace}
  for _, name in ipairs(kept) do redis.call('EXPIRE', name, retention) end
  redis.call('DEL', base .. 'changes:' .. trace)
  redis.call('EXPIRE', base .. 'operations:' .. trace, 60)
  local model, client, engine = unpack(redis.call('HMGET', key, 'm', 'c', 'e'))
  lifecycle.publish(base .. 'firehose', 'k', 'final', 't', trace, 'm', model or '', 'c', client or '',
    'e', engine or '', 'a', attempt, 's', status, 'x', error_type)
  redis.call('ZREM', base .. 'deadlines', trace)
  finished.add(trace, retention, base .. 'ended', base .. 'ended-bytes', unpack(kept))
end
