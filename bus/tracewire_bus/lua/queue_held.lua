-- #include queue_holders
-- Returns the entries of a holder.
-- KEYS: the queue's. ARGV: holder, the most bytes of data in all, the most bytes of data that an entry is returned
-- with.
local holder, most, inline = unpack(ARGV)
return queue_holders.reply_all(holder, tonumber(most), tonumber(inline))
