-- #include queue
-- #include queue_reply
-- #include queue_entry
-- #include queue_leave
-- Gives waiting entries to an engine. Clients take turns.
-- KEYS: the queue's, the token of the engine's takes, the holders. ARGV: token, engine, most entries, most bytes,
-- the most bytes of data that an entry is returned with, for how many microseconds an engine that has a suspect gets
-- no other, how many entries the engine has, '1' if it leaves entries to engines that have fewer, how many it has room
-- for. Returns the entries; nothing if the token is not valid; or 1 if the waiting entries are left to other engines.
-- Fields of the state: span and count, the time between takes while entries waited and the number of entries taken, in
-- which older takes count less; 'taker:ENGINE', when an engine asked last and how many entries it had then;
-- 'suspect:ENGINE' and 'suspected:ENGINE', the suspect that an engine has, and since when.
local call, whole = redis.call, queue.whole
-- For so long after it has asked, an engine counts as one that takes. An idle engine asks each second.
local TAKER_SEEN_US = 2.5e6
local valid_token, holders = KEYS[10], KEYS[11]
local state, turns, suspects = queue.state, queue.turns, queue.suspects
local token, engine, count, most, inline, alone, load, may_yield, room = unpack(ARGV)
local waiting, turn, since, span, taken_before =
  unpack(call('HMGET', state, 'waiting', 'turn', 'since', 'span', 'count'))
waiting, turn, since = whole(waiting, 0), whole(turn, 0), tonumber(since)
if call('GET', valid_token) ~= token then
  -- The token of the bell that woke this engine was meant for another.
  if waiting > 0 then queue.ring() end
  return false
end
count, most, inline, load, room = tonumber(count), tonumber(most), tonumber(inline), tonumber(load), tonumber(room)
local waited_before = waiting
local seconds, micros = unpack(call('TIME'))
local now = seconds * 1e6 + micros

-- Entries go to the engines that have the fewest, so that a burst does not all go to the engine that woke first. An
-- engine that has waited for the others in vain asks without '1', and gets what is left.
local left_to_others = false
if may_yield == '1' and waiting > 0 then
  local loads, fields = {load}, call('HGETALL', state)
  for index = 1, #fields, 2 do
    local taker = string.match(fields[index], '^taker:(.*)$')
    local at, had = string.match(fields[index + 1], '^(%d+) (%d+)$')
    if at and taker and taker ~= engine then
      if math.abs(now - at) > TAKER_SEEN_US then
        call('HDEL', state, fields[index])
      else
        loads[#loads + 1] = tonumber(had)
      end
    end
  end
  if #loads > 1 then
    table.sort(loads)
    local level, sum = 0, waiting
    for index = 1, #loads do
      -- An engine that has more than the level already gets no part of what waits.
      if index > 1 and loads[index] >= level then break end
      sum = sum + loads[index]
      level = math.ceil(sum / index)
    end
    count = math.max(0, math.min(count, level - load))
    left_to_others = count == 0
  end
end

local reply, size = {}, 0

-- An engine has one suspect at a time, whichever of its adapters takes it.
local core = queue.core(engine)
local suspect, suspected_at = unpack(call('HMGET', state, 'suspect:' .. core, 'suspected:' .. core))
if suspect and
    (queue.core(call('HGET', queue.taken, suspect) or '') ~= core or now - whole(suspected_at, 0) >= tonumber(alone)) then
  call('HDEL', state, 'suspect:' .. core, 'suspected:' .. core)
  suspect = false
end
if not suspect then
  local trace = call('ZPOPMIN', suspects)[1]
  local entry = trace and queue_entry.read(trace)
  if trace then waiting = waiting - 1 end
  if entry then
    size = entry.bytes
    queue_reply.claim(trace, entry, engine)
    call('HSET', state, 'suspect:' .. core, trace, 'suspected:' .. core, string.format('%.0f', now))
    reply[1] = queue_reply.entry(trace, entry, size <= inline)
  end
end

while #reply < count do
  local client, own_turn = unpack(call('ZPOPMIN', turns))
  if not client then break end
  local key = queue.client_key(client)
  local member, priority = unpack(call('ZPOPMIN', key))
  local trace = member and queue.trace_of(member)
  local entry = member and queue_entry.read(trace)
  if entry then
    size = size + entry.bytes
    if #reply > 0 and size > most then
      call('ZADD', key, priority, member)
      call('ZADD', turns, own_turn, client)
      break
    end
    waiting = waiting - 1
    queue_reply.claim(trace, entry, engine)
    reply[#reply + 1] = queue_reply.entry(trace, entry, entry.bytes <= inline)
    turn = turn + 1
    own_turn = turn
  elseif member then
    -- An engine that had not taken the entry has settled it.
    waiting = waiting - 1
  end
  if call('EXISTS', key) == 1 then call('ZADD', turns, own_turn, client) end
end

-- If its memory is full, Redis refuses a script at its first write, but never HDEL. So HDEL comes first.
call('HDEL', state, '')
if #reply < room then
  call('HSET', state, 'taker:' .. engine, string.format('%.0f %d', now, load + #reply))
else
  -- An engine without room does not ask for a while.
  call('HDEL', state, 'taker:' .. engine)
end
if waiting ~= waited_before then
  call('HSET', state, 'waiting', waiting, 'turn', turn, 'since', now)
  if #reply > 0 then call('SADD', holders, engine) end
  if since then
    span, taken_before = tonumber(span) or 0, tonumber(taken_before) or 0
    call('HSET', state, 'span', span * 0.9 + now - since, 'count', taken_before * 0.9 + #reply)
  end
  if waiting <= 0 then
    queue_leave.nothing()
  elseif call('EXISTS', queue.bell) == 0 then
    -- Wakes the next engine, in case a token was lost.
    queue.ring()
  end
end
if left_to_others and #reply == 0 and call('EXISTS', turns) == 1 then
  -- The token of the bell that woke this engine goes to another.
  queue.ring()
  return 1
end
return reply
