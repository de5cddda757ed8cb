-- #include entry_ids
-- #include record
-- #include stream
-- Ends an attempt whose trace waits for another engine, and appends the event `Waiting`. Does nothing if a later
-- attempt has begun, or if the attempt has no event.
-- KEYS: record, events. ARGV: attempt, schema, the encoded event before and after its number. Returns whether it was
-- appended.
local key, events = unpack(KEYS)
local attempt, schema, head, tail = unpack(ARGV)
if redis.call('EXISTS', events) == 0 then return 0 end
if record.count(redis.call('HGET', key, 'a')) > tonumber(attempt) then return 0 end
local last_attempt, last_number = entry_ids.parts(entry_ids.last(events))
-- Nothing fits after the trace's final event, nor after an attempt that was closed.
if last_attempt ~= attempt or #last_number > 9 then return 0 end
local number = last_number + 1
local id = attempt .. '-' .. string.format('%d', number)
local reply = redis.pcall('XADD', events, id, 'v', schema, 'd', head .. struct.pack('>I4', number) .. tail)
if type(reply) == 'table' and reply.err then return 0 end
stream.close_attempt(events, attempt, redis.call)
return 1
