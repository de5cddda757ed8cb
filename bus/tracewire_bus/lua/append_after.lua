-- #include stream
-- Appends an event that follows another in the same pipeline, unless the other is not there.
-- KEYS: the trace's events. ARGV: id, schema, encoded event, id of the event before it. Returns the id.
local events = KEYS[1]
local id, schema, data, previous = unpack(ARGV)
if not stream.ends_with(events, previous) then return redis.error_reply('BEHIND ' .. previous) end
return redis.call('XADD', events, id, 'v', schema, 'd', data)
