-- The streams of lifecycle events, which watchers of all traces read.
local lifecycle = {}
-- About how many entries each stream keeps, and for how long after its last entry.
local ENTRIES, SECONDS = 2000, 24 * 3600

-- The keys beside a trace's record, of all traces with its hash tag: their lifecycle events and their deadlines. Their
-- names are not arguments: Redis lets a user who passes a key to a script read it, and a client may write these only.
function lifecycle.beside(record_key)
  local base = string.match(record_key, '^[^{]*{[^}]*}:')
  return base .. 'firehose', base .. 'deadlines'
end

-- Adds an entry with these fields to the stream at key.
function lifecycle.publish(key, ...)
  redis.call('XADD', key, 'MAXLEN', '~', ENTRIES, '*', ...)
  redis.call('EXPIRE', key, SECONDS)
end
