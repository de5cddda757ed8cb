-- Makes an entry a dead letter, once.
-- KEYS: dead letters, the entry's mark. ARGV: for how many seconds to remember the mark, about how many letters are
-- kept, then the letter's fields. Returns whether a letter was added.
local letters, mark = unpack(KEYS)
local remember, most = unpack(ARGV, 1, 2)
-- If its memory is full, Redis refuses a script at its first write, but never EXPIRE and DEL. So these come first.
if redis.call('EXPIRE', mark, remember) == 1 then return 0 end
redis.call('DEL', mark)
redis.call('SET', mark, 1, 'EX', remember)
redis.call('XADD', letters, 'MAXLEN', '~', most, '*', unpack(ARGV, 3))
return 1
