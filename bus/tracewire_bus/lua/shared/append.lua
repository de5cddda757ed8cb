-- #include stream
-- #include lifecycle
local append = {}

-- Appends an event. Returns the error to reply with where it is refused, and nothing where it stands there.
-- previous is the id of the event that it follows in the same pipeline, or ''.
function append.event(events, key, id, schema, data, attempt, previous)
  if (tonumber(redis.call('HGET', key, 'a')) or 0) > tonumber(attempt) then
    -- Later events of this attempt come without a script, so the stream itself has to refuse them.
    stream.close_attempt(events, attempt, redis.pcall)
    return redis.error_reply('FENCED by a later attempt')
  end
  if not stream.ends_with(events, previous) then return redis.error_reply('BEHIND ' .. previous) end
  local reply = redis.pcall('XADD', events, id, 'v', schema, 'd', data)
  if type(reply) == 'table' and reply.err then return reply end
end

-- Drops the changes of live parameters up to this version, of which an event tells now; none where it is ''.
function append.drop_changes(changes, version)
  if version ~= '' then redis.call('ZREMRANGEBYSCORE', changes, '-inf', version) end
end

-- Publishes what watchers of all traces get of the event: the arguments of the script from first on, if there are
-- any.
function append.publish(key, lifecycle_stream, first)
  if ARGV[first] then
    lifecycle.publish(lifecycle_stream, 'c', redis.call('HGET', key, 'c') or '', unpack(ARGV, first))
  end
end
