-- Removes a taken entry.
-- KEYS: data, entries, taken. ARGV: trace, its holder or '' for any, its attempt or 0 for any. Returns whether it was
-- removed.
local data, entries, taken = unpack(KEYS)
local trace, holder, attempt = unpack(ARGV)
if holder ~= '' and redis.call('HGET', taken, trace) ~= holder then return 0 end
if attempt ~= '0' then
  -- The same holder may have taken the entry again, after others.
  local ATTEMPT = 8
  local packed = redis.call('HGET', entries, trace)
  local fine, fields = pcall(cmsgpack.unpack, packed or '')
  local present = packed and fine and type(fields) == 'table' and (tonumber(fields[ATTEMPT]) or 0)
  if present and present ~= tonumber(attempt) then return 0 end
end
-- Engines find the entry by its holder, which is removed last: a crash in between leaves nothing behind.
for _, key in ipairs({data, entries, taken}) do redis.call('HDEL', key, trace) end
return 1
