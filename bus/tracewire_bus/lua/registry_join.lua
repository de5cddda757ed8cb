-- Adds an engine to the set of engines.
-- KEYS: the set. ARGV: engine.
-- If its memory is full, Redis refuses a script at its first write, but never SREM. So SREM comes first.
redis.call('SREM', KEYS[1], '')
redis.call('SADD', KEYS[1], ARGV[1])
return 1
