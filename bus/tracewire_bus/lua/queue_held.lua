-- #include queue_holders
-- Replies the entries of a holder.
-- KEYS: the queue's. ARGV: holder, most bytes in all, most bytes of data that is replied with its entry.
local holder, most, inline = unpack(ARGV)
return queue_holders.reply_all(holder, tonumber(most), tonumber(inline))
