-- #include queue
-- #include queue_join
-- Queues a submission, once for each trace.
-- KEYS: the queue's, the trace's mark. ARGV: trace, schema, client, priority, lease, the limit of the queue or 0, for
-- how many seconds to remember the trace, how many engines may be lost over it, the encoded submission. The limits that
-- engines have published in the queue's state replace the caller's. Returns nothing; 0 if the trace was put before and is in the queue, waiting or taken; 1 if it was put before and has left;
-- or, if the queue is full, how many wait and in how many ms there is room again.
local call, whole = redis.call, queue.whole
local submitted = KEYS[10]
local trace, schema, client, priority, lease, limit, remember, tries, data = unpack(ARGV)
-- The greatest number of attempts, and of bytes if no engine has published a limit.
local MOST_ATTEMPTS, MOST_BYTES = 100, 2^25
if #trace > 1024 or #client > 1024 or #lease > 1024 then return redis.error_reply('LIMIT name: a name is too long') end
local own_limit, client_limit, most_bytes, waiting, number, turn =
  unpack(call('HMGET', queue.state, 'limit', 'client-limit', 'bytes', 'waiting', 'number', 'turn'))
limit, client_limit = whole(own_limit, tonumber(limit)), whole(client_limit, 0)
most_bytes = whole(most_bytes, MOST_BYTES)
if #data > most_bytes then
  return redis.error_reply('LIMIT submission-bytes: a submission has at most ' .. most_bytes .. ' bytes, got ' .. #data)
end
if not call('SET', submitted, 1, 'EX', remember, 'NX') then return 1 - call('HEXISTS', queue.entries, trace) end

local client_waits = call('ZCARD', queue.client_key(client))
waiting, number, turn = whole(waiting, 0), whole(number, 0) + 1, whole(turn, 0)

if client_limit > 0 and client_waits >= client_limit then
  call('DEL', submitted)
  return {client_waits, 1000}
end
if limit > 0 and waiting >= limit then
  -- A client below its share of the limit is refused at twice the limit only.
  local clients = call('ZCARD', queue.turns) + (client_waits == 0 and 1 or 0)
  local room = client_waits * clients < limit and 2 * limit or limit
  if waiting >= room then
    call('DEL', submitted)
    local span, count = unpack(call('HMGET', queue.state, 'span', 'count'))
    span, count = tonumber(span), tonumber(count)
    local retry_us = span and count and span / count * (waiting - room + 1) or 1e6
    return {waiting, math.floor(math.min(math.max(retry_us / 1000, 100), 60000))}
  end
end

local seconds, micros = unpack(call('TIME'))
local entry = {
  schema = schema, queued_us = seconds .. string.format('%06d', micros), client = client, priority = priority,
  lease = lease, number = number, bytes = #data, attempt = 0, tries = math.min(whole(tries, 1), MOST_ATTEMPTS), lost = 0,
  reason = ''
}
queue.write(trace, entry)
call('HSET', queue.data, trace, data)
turn = queue_join(trace, entry, client_waits, turn)
call('HSET', queue.state, 'waiting', waiting + 1, 'number', number, 'turn', turn)
queue.ring()
return false
