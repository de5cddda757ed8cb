-- Orders an engine to drain.
-- KEYS: its control stream. ARGV: author, within how many seconds or '', for how many seconds to keep the
-- stream, the author's signature or ''.
local control = KEYS[1]
local author, within, keep_seconds, proof = unpack(ARGV)
-- If its memory is full, Redis refuses a script at its first write, but never EXPIRE. So EXPIRE comes first.
redis.call('EXPIRE', control, keep_seconds)
redis.call('XADD', control, '*', 'k', 'drain', 't', '', 'b', author, 'w', within, 'g', proof)
redis.call('EXPIRE', control, keep_seconds)
return 1
