-- The queue of one model. Every script that includes this is given these keys first:
--   entries: entry by trace, packed           data: encoded submission by trace
--   taken: holder by trace                    state: counters, and what is known of each engine that takes
--   turns: clients by their next turn         bell: tokens that idle engines block on
--   leases: leases that entries wait under    client: and lease: prefixes of each client's and lease's own set
--   suspects: entries with one try left
local queue = {}
local call = redis.call
local entries, data, taken, state, turns, bell, leases, client_prefix, lease_prefix, suspects = unpack(KEYS, 1, 10)
queue.entries, queue.data, queue.taken, queue.state, queue.turns = entries, data, taken, state, turns
queue.bell, queue.suspects = bell, suspects

local function text(value)
  if type(value) == 'number' then return tostring(value) end
  return type(value) == 'string' and value or ''
end

-- A whole number as it stands in Redis; default where it is malformed.
function queue.whole(value, default)
  local number = (type(value) == 'number' or type(value) == 'string') and tonumber(value)
  return number and number >= -2^53 and number <= 2^53 and math.floor(number) or default
end
local whole = queue.whole

-- The entry of a trace, or false. A malformed field reads as its default: the engine that takes the entry refuses
-- what is left of it.
function queue.entry(trace)
  local packed = call('HGET', entries, trace)
  if not packed then return false end
  local fine, fields = pcall(cmsgpack.unpack, packed)
  if not fine or type(fields) ~= 'table' then fields = {} end
  return {
    schema = text(fields[1]), queued_us = text(fields[2]), client = text(fields[3]), priority = whole(fields[4], 0),
    lease = text(fields[5]), number = whole(fields[6], 0), bytes = whole(fields[7], 0), attempt = whole(fields[8], 0),
    tries = whole(fields[9], 1), lost = whole(fields[10], 0), reason = text(fields[11])
  }
end

function queue.write(trace, entry)
  call('HSET', entries, trace, cmsgpack.pack({
    entry.schema, entry.queued_us, entry.client, entry.priority, entry.lease, entry.number, entry.bytes, entry.attempt,
    entry.tries, entry.lost, entry.reason
  }))
end

function queue.client_key(client) return client_prefix .. client end
function queue.lease_key(lease) return lease_prefix .. lease end

-- The member for an entry in its client's sorted set: the number orders entries of equal priority.
local NUMBER_DIGITS = 16
local function member(trace, number) return string.format('%0' .. NUMBER_DIGITS .. 'd', number) .. trace end
function queue.trace_of(of_member) return string.sub(of_member, NUMBER_DIGITS + 1) end

-- Wakes one idle engine.
function queue.ring()
  if call('RPUSH', bell, 1) > 64 then call('LPOP', bell) end
end

function queue.leave_lease(trace, lease)
  if lease == '' then return end
  local key = queue.lease_key(lease)
  call('SREM', key, trace)
  if call('EXISTS', key) == 0 then call('SREM', leases, lease) end
end

-- Nothing waits any more.
function queue.empty()
  call('DEL', bell)
  call('HDEL', state, 'since')
end

-- Removes a waiting entry from the order.
function queue.leave(trace, entry)
  local client = entry.client
  local key = queue.client_key(client)
  call('ZREM', key, member(trace, entry.number))
  call('ZREM', suspects, trace)
  if call('EXISTS', key) == 0 then call('ZREM', turns, client) end
  queue.leave_lease(trace, entry.lease)
  local waiting = whole(call('HGET', state, 'waiting'), 0) - 1
  call('HSET', state, 'waiting', waiting)
  if waiting <= 0 then queue.empty() end
end

-- Adds an entry to the order. client_waits is how many of its client wait already. turn is the last turn that was
-- given; returns the last one that is given now.
function queue.join(trace, entry, client_waits, turn)
  if entry.lost > 0 and entry.lost + 1 >= entry.tries then
    call('ZADD', suspects, entry.number, trace)
  else
    call('ZADD', queue.client_key(entry.client), entry.priority, member(trace, entry.number))
    if client_waits == 0 then
      turn = turn + 1
      call('ZADD', turns, turn, entry.client)
    end
  end
  if entry.lease ~= '' then
    call('SADD', queue.lease_key(entry.lease), trace)
    call('SADD', leases, entry.lease)
  end
  return turn
end

-- Gives an entry to an engine.
function queue.claim(trace, entry, engine)
  queue.leave_lease(trace, entry.lease)
  entry.attempt = entry.attempt + 1
  queue.write(trace, entry)
  call('HSET', taken, trace, engine)
end

-- The entries of a holder in the order in which they came, without those whose traces are keys of known.
function queue.held_by(holder, known)
  local held, all = {}, call('HGETALL', taken)
  for index = 1, #all, 2 do
    local trace, by = all[index], all[index + 1]
    if by == holder and not known[trace] then
      local entry = queue.entry(trace)
      if entry then
        held[#held + 1] = {trace = trace, entry = entry}
      else
        -- It was settled, and a crash left this behind.
        call('HDEL', taken, trace)
      end
    end
  end
  table.sort(held, function(one, other) return one.entry.number < other.entry.number end)
  return held
end

-- An entry as it is replied; with its data if with_data.
function queue.reply(trace, entry, with_data)
  return {
    trace, entry.schema, entry.queued_us, with_data and call('HGET', data, trace),
    entry.attempt, entry.tries, entry.lost, entry.reason
  }
end

-- All entries of a holder, with the data of each that has at most inline bytes, up to most bytes in all.
function queue.reply_all(holder, most, inline)
  local reply, size = {}, 0
  for _, one in ipairs(queue.held_by(holder, {})) do
    local bytes = one.entry.bytes
    local with_data = bytes <= inline and size + bytes <= most
    if with_data then size = size + bytes end
    reply[#reply + 1] = queue.reply(one.trace, one.entry, with_data)
  end
  return reply
end
