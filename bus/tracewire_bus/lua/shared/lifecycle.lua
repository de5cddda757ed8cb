-- The streams of lifecycle events, which watchers of all traces read.
local lifecycle = {}
-- About how many entries each stream keeps, and for how long after its last entry.
local ENTRIES, SECONDS = 2000, 24 * 3600

-- Adds an entry with these fields to the stream at key.
function lifecycle.publish(key, ...)
  redis.call('XADD', key, 'MAXLEN', '~', ENTRIES, '*', ...)
  redis.call('EXPIRE', key, SECONDS)
end
