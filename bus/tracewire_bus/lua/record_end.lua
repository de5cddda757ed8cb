-- #include stream
-- #include finish
-- Ends a trace, whichever engine runs it. Redis refuses the later events of that engine.
-- KEYS: record, events. ARGV: trace, the prefix of every key with its hash tag, schema, the encoded final before and
-- after the number of its attempt, retention in seconds, status, the error's type. Returns 1, or 0 if it had ended
-- before.
local events = KEYS[2]
local trace, base, schema, head, tail, retention, status, error_type = unpack(ARGV)
if stream.ended(events) then return 0 end
finish(base, trace, schema, head, tail, retention, status, error_type)
return 1
