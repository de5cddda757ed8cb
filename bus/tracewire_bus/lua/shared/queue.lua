-- The queue of one model. Every script that includes this is given these keys first:
--   entries: entry by trace, packed
--   taken: holder by trace                    state: counters, limits, and notes on each engine that takes
--   turns: clients by their next turn         bell: tokens that idle engines block on
--   leases: leases that entries wait under    client: and lease: prefixes of each client's and lease's own set
--   suspects: entries with one try left
-- The encoded submissions by trace are in a key that is named after the entries': Redis lets a user who passes a key to
-- a script read it, and a client may write submissions only.
local queue = {
  entries = KEYS[1], taken = KEYS[2], state = KEYS[3], turns = KEYS[4], bell = KEYS[5], leases = KEYS[6],
  suspects = KEYS[9], data = string.sub(KEYS[1], 1, -1 - #'entries') .. 'data'
}
local call = redis.call
local client_prefix, lease_prefix = KEYS[7], KEYS[8]

-- A whole number from Redis; default if it is malformed.
function queue.whole(value, default)
  local number = (type(value) == 'number' or type(value) == 'string') and tonumber(value)
  return number and number >= -2^53 and number <= 2^53 and math.floor(number) or default
end

function queue.write(trace, entry)
  call('HSET', queue.entries, trace, cmsgpack.pack({
    entry.schema, entry.queued_us, entry.client, entry.priority, entry.lease, entry.number, entry.bytes, entry.attempt,
    entry.tries, entry.lost, entry.reason
  }))
end

-- The engine that a name stands for: the adapters of one engine are ENGINE, ENGINE.1, ENGINE.2 and so on.
function queue.core(name) return string.match(name, '^(.+)%.%d+$') or name end

function queue.client_key(client) return client_prefix .. client end
function queue.lease_key(lease) return lease_prefix .. lease end

-- The member for an entry in its client's sorted set: the number orders entries of equal priority.
local NUMBER_DIGITS = 16
function queue.member(trace, number) return string.format('%016d', number) .. trace end
function queue.trace_of(of_member) return string.sub(of_member, NUMBER_DIGITS + 1) end

-- Wakes one idle engine.
function queue.ring()
  if call('RPUSH', queue.bell, 1) > 64 then call('LPOP', queue.bell) end
end
