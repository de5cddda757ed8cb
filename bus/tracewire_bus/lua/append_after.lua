-- #include stream
-- Appends an event that follows another one in the same pipeline, if that one is the last of the stream.
-- KEYS: the trace's events. ARGV: id, schema, encoded event, id of the event before it. Returns the id, or
-- the error BEHIND.
local events = KEYS[1]
local id, schema, data, previous = unpack(ARGV)
if not stream.ends_with(events, previous) then return redis.error_reply('BEHIND ' .. previous) end
return redis.call('XADD', events, id, 'v', schema, 'd', data)
