-- #include stream
-- Appends an event. Returns the error to reply with if the event is refused, else nothing.
-- previous is the id of the event that it follows in the same pipeline, or ''.
local function append(events, key, id, schema, data, attempt, previous)
  if (tonumber(redis.call('HGET', key, 'a')) or 0) > tonumber(attempt) then
    -- Later events of this attempt come without a script, so the stream itself has to refuse them.
    stream.close_attempt(events, attempt, redis.pcall)
    return redis.error_reply('FENCED by a later attempt')
  end
  if not stream.ends_with(events, previous) then return redis.error_reply('BEHIND ' .. previous) end
  local reply = redis.pcall('XADD', events, id, 'v', schema, 'd', data)
  if type(reply) == 'table' and reply.err then return reply end
end
