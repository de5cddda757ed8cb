-- #include stream
-- #include clock
-- #include record
-- Lets an engine begin an attempt. The same engine may ask again for the same attempt.
-- KEYS: record, events, changes, and if the submission is signed the mark of its nonce. ARGV: engine, for how many
-- seconds to remember the record, attempt, for how many to keep the trace after its end, how many changes of live
-- parameters may wait, how many may come a second, model or '', and if the submission is signed a random word that the
-- engine gives whenever it asks for this attempt again, and the id of the key. Returns 'ended', 'elsewhere' (the trace is
-- of another model), "another's" (another key has submitted it), 'overtaken' (the record has this attempt or a later one
-- already), 'replayed' (an attempt as late has had the nonce, and the record has none so late), or the time in ms, the
-- record, and the changes of live parameters that no event has reported.
local key, events, changes, mark = unpack(KEYS)
local engine, remember, attempt, retention = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local most, most_a_second, model, word, signer = unpack(ARGV, 5)
local attempts, last_engine, own_model, submitter = unpack(redis.call('HMGET', key, 'a', 'e', 'm', 'k'))
if own_model and model ~= '' and own_model ~= model then return 'elsewhere' end
if stream.ended(events) then return 'ended' end
if mark and submitter and submitter ~= signer then return "another's" end
local present, had = mark and redis.call('GET', mark), false
if present then
  local taken, by = string.match(present, '^(%d+):(%x+)$')
  had = not taken or tonumber(taken) >= attempt and by ~= word
end
local last = record.count(attempts)
-- The record has an attempt that has not ended. The queue's server may have forgotten it, after a failover.
if attempt < last or attempt == last and (last_engine ~= engine or had) then return 'overtaken' end
if had then return 'replayed' end
redis.call('HSET', key, 'a', attempt, 'e', engine, 's', 'running', 'r', retention, 'lw', most, 'lr', most_a_second)
if redis.call('TTL', key) == -1 then redis.call('EXPIRE', key, remember) end
if mark then redis.call('SET', mark, ARGV[3] .. ':' .. word, 'EX', remember) end
return {clock.milliseconds(), redis.call('HGETALL', key), redis.call('ZRANGE', changes, 0, -1)}
