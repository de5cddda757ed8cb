-- Orders an engine to drain.
-- KEYS: its control stream. ARGV: author, how many seconds it has or '', for how many to keep the stream.
local control = KEYS[1]
local author, within, keep_seconds = unpack(ARGV)
-- A full Redis refuses a script at its first write. EXPIRE is never refused.
redis.call('EXPIRE', control, keep_seconds)
redis.call('XADD', control, '*', 'k', 'drain', 't', '', 'b', author, 'w', within)
redis.call('EXPIRE', control, keep_seconds)
return 1
