-- #include queue_holders
-- Makes a token for an engine's takes, and returns the entries that the engine has taken but does not know of.
-- KEYS: the queue's, the token of the engine's takes. ARGV: token, engine, most entries, most bytes, the most bytes of
-- data that an entry is returned with, for how many seconds the token is valid, then the traces that the engine knows.
local valid_token = KEYS[10]
local token, engine, count, most, inline, valid_seconds = unpack(ARGV, 1, 6)
count, most, inline = tonumber(count), tonumber(most), tonumber(inline)
redis.call('DEL', valid_token)
redis.call('SET', valid_token, token, 'EX', valid_seconds)
local known = {}
for index = 7, #ARGV do known[ARGV[index]] = true end

local reply, size = {}, 0
for _, one in ipairs(queue_holders.held_by(engine, known)) do
  local bytes = one.entry.bytes
  size = size + bytes
  if #reply == count or #reply > 0 and size > most then break end
  reply[#reply + 1] = queue_reply.entry(one.trace, one.entry, bytes <= inline)
end
return reply
