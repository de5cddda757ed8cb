-- #include stream
-- #include finished
-- Deletes finished traces of one hash tag. Traces that run stay.
-- KEYS: finished traces, their sizes. ARGV: the prefix of every key with the hash tag, then the traces' ids. Returns
-- how many were deleted.
local list, sizes = unpack(KEYS, 1, 2)
local base = ARGV[1]
local dropped = 0
for index = 2, #ARGV do
  local trace = ARGV[index]
  if redis.call('ZSCORE', list, trace) then
    finished.remove(list, sizes, trace)
    if stream.ended(base .. 'events:' .. trace) then
      for _, kind in ipairs({'events:', 'trace:', 'snapshot:', 'blobs:', 'operations:'}) do
        redis.call('UNLINK', base .. kind .. trace)
      end
      dropped = dropped + 1
    end
  end
end
return dropped
