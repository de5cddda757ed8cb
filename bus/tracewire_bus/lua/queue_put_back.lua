-- #include queue
-- #include queue_entry
-- #include queue_join
-- #include queue_holders
-- Puts entries of a holder back where they waited, ahead of their clients' later entries. If the holder was lost,
-- entries without a try left are given up instead.
-- KEYS: the queue's, the holders. ARGV: holder, reason, '1' if the holder was lost, the holder for entries that are
-- given up, one trace or '' for all, most entries of this call, the attempt of that trace or 0 for any. Returns the
-- entries that wait again, each with its last attempt, and 1 if the holder has more.
local call, whole = redis.call, queue.whole
local holders = KEYS[10]
local holder, reason, lost, given_up, only, most, attempt = unpack(ARGV)
most = tonumber(most)
-- If its memory is full, Redis refuses a script at its first write, but never HDEL. So HDEL comes first.
call('HDEL', queue.taken, '')
local held = {}
if only ~= '' then
  local entry = call('HGET', queue.taken, only) == holder and queue_entry.read(only)
  local same = attempt == '0' or entry and tonumber(attempt) == tonumber(entry.attempt)
  if entry and same then held[1] = {trace = only, entry = entry} end
else
  held = queue_holders.held_by(holder, {})
end
local waiting, turn = unpack(call('HMGET', queue.state, 'waiting', 'turn'))
waiting, turn = whole(waiting, 0), whole(turn, 0)
local back = {}
for index = 1, math.min(#held, most) do
  local trace, entry = held[index].trace, held[index].entry
  entry.reason = reason
  if lost == '1' then entry.lost = entry.lost + 1 end
  queue.write(trace, entry)
  if lost == '1' and entry.lost >= entry.tries then
    call('HSET', queue.taken, trace, given_up)
  else
    turn = queue_join(trace, entry, call('ZCARD', queue.client_key(entry.client)), turn)
    call('HDEL', queue.taken, trace)
    back[#back + 1] = {trace, entry.attempt}
    queue.ring()
  end
end
if #back > 0 then call('HSET', queue.state, 'waiting', waiting + #back, 'turn', turn) end
local more = #held > most
if only == '' and not more then
  call('SREM', holders, holder)
  local core = queue.core(holder)
  call('HDEL', queue.state, 'suspect:' .. core, 'suspected:' .. core, 'taker:' .. holder)
end
return {back, more and 1 or 0}
