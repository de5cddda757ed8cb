-- #include queue_entry
-- #include queue_reply
-- The entries that engines and others hold.
local queue_holders = {}
local call = redis.call

-- The entries of a holder in the order in which they came, without those whose traces are keys of known.
function queue_holders.held_by(holder, known)
  local held, all = {}, call('HGETALL', queue.taken)
  for index = 1, #all, 2 do
    local trace, by = all[index], all[index + 1]
    if by == holder and not known[trace] then
      local entry = queue_entry.read(trace)
      if entry then
        held[#held + 1] = {trace = trace, entry = entry}
      else
        -- The entry was settled, and a crash left its holder behind.
        call('HDEL', queue.taken, trace)
      end
    end
  end
  table.sort(held, function(one, other) return one.entry.number < other.entry.number end)
  return held
end

-- All entries of a holder, with the data of each that has at most inline bytes, up to most bytes in all.
function queue_holders.reply_all(holder, most, inline)
  local reply, size = {}, 0
  for _, one in ipairs(queue_holders.held_by(holder, {})) do
    local bytes = one.entry.bytes
    local with_data = bytes <= inline and size + bytes <= most
    if with_data then size = size + bytes end
    reply[#reply + 1] = queue_reply.entry(one.trace, one.entry, with_data)
  end
  return reply
end
