"""Queues of submissions, one a model: bounded, and fair between clients.

Clients with waiting entries stand in a ring. A take serves the client whose turn it is, one entry, and puts it at the
end of the ring; a client that comes, or comes back, joins there. So before an entry at the head of a client's own
order, each other client is served at most once, however much it has waiting, and leaving and returning gains nothing.
A client's own entries go by priority, the lower number first, then in the order they came.

An entry that was taken stays its engine's until it is settled, or until it is put back where it was: by its engine,
which leaves, or by whoever finds that its engine's lease is gone (`put_back`). Each take numbers the entry, and that
number is the attempt under which it runs: whoever took it before is fenced by it. An entry whose engines were lost as
often as it may be tried is *given up*: held by nobody's name until somebody has ended its trace. One with a single try
left is a *suspect*. Suspects wait apart, and an engine gets one at a time: what else ran on an engine when it was lost
does not share the blame to the end. One that takes its time, because it is paused, or hangs, or is long, has its engine
to itself for a minute only: it has had the time to do harm.

What a take removed from the ring and never handed out, because it was cancelled or its connection broke, is found by
the engine's next take. That one first puts a new token in Redis, and takes under an old one do nothing: a take that is
still on its way then cannot take any more.

Each put drops a token on a bell, a list, that engines without work block on, so that one submission wakes one engine.
The bell is empty when nothing waits.

All keys of a queue share the model's hash tag. Those of a client or lease are made up in the scripts from names,
because only Redis knows whose turn it is.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import anyio

from tracewire_bus.transport.backoff import Backoff
from tracewire_bus.transport.errors import BusError, as_bus_error, is_transient
from tracewire_bus.transport.guard import GREATEST, Guard, integer
from tracewire_bus.transport.link import AfterOthers, Link
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.scripts import Script
from tracewire_bus.wire.codec import schema_text

from .keys import Keys

__all__ = ["DeadLetter", "Queue", "QueueFull", "Taken", "claiming", "settling"]

logger = logging.getLogger("tracewire")

#: How long a trace that was submitted is remembered, in seconds, so that it is not queued again and is known to exist.
REMEMBER_S: Final = 7 * 24 * 3600
#: How many dead letters are kept, about.
_DEAD_LETTERS: Final = 10_000
#: What a take returns at most, in bytes of data, once it has an entry.
_TAKE_BYTES: Final = 8 * 1024 * 1024
#: Larger data does not pass through Lua, which would copy it twice.
_INLINE_BYTES: Final = 64 * 1024
#: An engine without work looks at least this often, in seconds, should a token of the bell be lost.
_POLL_S: Final = 1.0
#: How long an engine that has asked for work counts as one that takes, in seconds: without work it asks each second.
_SEEN_S: Final = 2.5
#: How long an engine leaves what waits to others who have less, in seconds, before it takes it all the same.
_YIELD_S: Final = 0.03
#: How long a token of an engine's takes is valid, in seconds. A new one costs a round trip.
_TOKEN_S: Final = 24 * 3600
#: Who holds what was given up: no engine is called so, nor is a lease held by such a name.
_GIVEN_UP: Final = b"\1given up"
#: How long one of many looks after a queue for all of them without saying so again, in seconds.
CARE_S: Final = 2.5
#: How many entries one call of a script puts back.
_PUT_BACK_AT_ONCE: Final = 100
#: How long the other suspects wait for the one that an engine has, in seconds.
SUSPECT_S: float = 60.0
#: Greatest priority, either way, that a sorted set tells from its neighbour.
_MOST_PRIORITY: Final = 2**53

_PARTS: Final = ("entries", "data", "taken", "state", "turns", "bell", "leases", "client:", "lease:", "suspects")

# What all scripts begin with. An entry is {schema, micros, client, priority, lease, number, bytes, times taken, tries,
# engines lost, why the last one was}. A Redis that is
# full refuses a script only before it has written anything: those that make room begin with what it never refuses.
_COMMON: Final = """
local call = redis.call
local entries, data, taken, state, turns, bell, leases = unpack(KEYS, 1, 7)
local suspects = KEYS[10]

local function text(value)
  if type(value) == 'number' then return tostring(value) end
  return type(value) == 'string' and value or ''
end

local function whole(value, other)
  local number = (type(value) == 'number' or type(value) == 'string') and tonumber(value)
  return number and number >= -2^53 and number <= 2^53 and math.floor(number) or other
end

-- What is malformed in an entry is as if it had never been written: who takes the entry finds out what is left of it.
local function entry_of(trace)
  local packed = call('HGET', entries, trace)
  if not packed then return false end
  local fine, entry = pcall(cmsgpack.unpack, packed)
  if not fine or type(entry) ~= 'table' then entry = {} end
  return {
    text(entry[1]), text(entry[2]), text(entry[3]), whole(entry[4], 0), text(entry[5]), whole(entry[6], 0),
    whole(entry[7], 0), whole(entry[8], 0), whole(entry[9], 1), whole(entry[10], 0), text(entry[11])
  }
end

-- Its member of its client's set, which orders equal priorities.
local function place_of(trace, number)
  return string.format('%016d', number) .. trace
end

local function ring()
  if call('RPUSH', bell, 1) > 64 then call('LPOP', bell) end
end

local function leave_lease(trace, lease)
  if lease == '' then return end
  local leased = KEYS[9] .. lease
  call('SREM', leased, trace)
  if call('EXISTS', leased) == 0 then call('SREM', leases, lease) end
end

local function leave_nothing()
  call('DEL', bell)
  call('HDEL', state, 'since')
end

-- What waited leaves the order.
local function leave(trace, entry)
  local client = entry[3]
  local own = KEYS[8] .. client
  call('ZREM', own, place_of(trace, entry[6]))
  call('ZREM', suspects, trace)
  if call('EXISTS', own) == 0 then call('ZREM', turns, client) end
  leave_lease(trace, entry[5])
  local waiting = whole(call('HGET', state, 'waiting'), 0) - 1
  call('HSET', state, 'waiting', waiting)
  if waiting <= 0 then leave_nothing() end
end

-- Entries that somebody holds, but for some, in the order they came.
local function held_by(holder, but)
  local held, all = {}, call('HGETALL', taken)
  for index = 1, #all, 2 do
    local trace = all[index]
    if all[index + 1] == holder and not but[trace] then
      local entry = entry_of(trace)
      if entry then
        held[#held + 1] = {trace, entry}
      else
        -- Half settled.
        call('HDEL', taken, trace)
      end
    end
  end
  table.sort(held, function(one, other) return one[2][6] < other[2][6] end)
  return held
end

-- What waits joins the order: `own` is how many of its client's wait. Returns the number of turns given.
local function join(trace, entry, own, turn)
  local client, lease = entry[3], entry[5]
  local lost = entry[10] or 0
  if lost > 0 and lost + 1 >= entry[9] then
    call('ZADD', suspects, entry[6], trace)
  else
    call('ZADD', KEYS[8] .. client, entry[4], place_of(trace, entry[6]))
    if own == 0 then
      turn = turn + 1
      call('ZADD', turns, turn, client)
    end
  end
  if lease ~= '' then
    call('SADD', KEYS[9] .. lease, trace)
    call('SADD', leases, lease)
  end
  return turn
end

local function shown(trace, entry, whole)
  return {
    trace, entry[1], entry[2], whole and call('HGET', data, trace),
    entry[8] or 0, entry[9] or 1, entry[10] or 0, entry[11] or ''
  }
end

-- An entry is this engine's from now on.
local function claim(trace, entry, engine)
  leave_lease(trace, entry[5])
  entry[8] = (entry[8] or 0) + 1
  call('HSET', entries, trace, cmsgpack.pack(entry))
  call('HSET', taken, trace, engine)
end

-- All that a holder has, whole where it is small.
local function all_shown(holder, most, inline)
  local found, size = {}, 0
  for _, one in ipairs(held_by(holder, {})) do
    local bytes = one[2][7]
    local whole = bytes <= inline and size + bytes <= most
    if whole then size = size + bytes end
    found[#found + 1] = shown(one[1], one[2], whole)
  end
  return found
end
"""

_PUT: Final = Script(
    _COMMON
    + """
local submitted = KEYS[11]
local trace, schema, client, priority, lease, limit, remember, tries = unpack(ARGV, 1, 8)
if not call('SET', submitted, 1, 'EX', remember, 'NX') then return 1 end

local own = KEYS[8] .. client
local mine = call('ZCARD', own)
local was = call('HMGET', state, 'waiting', 'number', 'turn')
local waiting, number, turn = whole(was[1], 0), whole(was[2], 0) + 1, whole(was[3], 0)
limit = tonumber(limit)
if limit > 0 and waiting >= limit then
  local clients = call('ZCARD', turns) + (mine == 0 and 1 or 0)
  local room = mine * clients < limit and 2 * limit or limit
  if waiting >= room then
    call('DEL', submitted)
    local took = call('HMGET', state, 'span', 'count')
    local retry = 1e6
    local span, count = tonumber(took[1]), tonumber(took[2])
    if span and count then retry = span / count * (waiting - room + 1) end
    return {waiting, math.floor(math.min(math.max(retry / 1000, 100), 60000))}
  end
end

local time = call('TIME')
local entry = {
  schema, time[1] .. string.format('%06d', time[2]), client, priority, lease, number, #ARGV[9],
  0, tonumber(tries), 0, ''
}
call('HSET', entries, trace, cmsgpack.pack(entry))
call('HSET', data, trace, ARGV[9])
turn = join(trace, entry, mine, turn)
call('HSET', state, 'waiting', waiting + 1, 'number', number, 'turn', turn)
ring()
return false
"""
)

# Returns a number where what waits is for others, who have fewer. `span` and `count`: time between takes while there
# was something, and entries taken, older ones counting ever less. `taker:` and an engine that takes: when it last
# asked, and how many it had then.
_TAKE: Final = Script(
    _COMMON
    + """
local token, engine, count, most, inline, alone, load, patient, room = unpack(ARGV)
local was = call('HMGET', state, 'waiting', 'turn', 'since', 'span', 'count')
local waiting, turn, since = whole(was[1], 0), whole(was[2], 0), tonumber(was[3])
if call('GET', KEYS[11]) ~= token then
  -- The bell that it came by is somebody else's.
  if waiting > 0 then ring() end
  return false
end
count, most, inline = tonumber(count), tonumber(most), tonumber(inline)
local found, size, before = {}, 0, waiting
local time = call('TIME')
local now = time[1] * 1e6 + time[2]
load = tonumber(load)

-- What is left when all that take have equally many at most, so that a burst does not all go to the engine that woke
-- first. It may take more when the others have not come for it.
local others = false
if patient == '1' and waiting > 0 then
  local loads, all = {load}, call('HGETALL', state)
  for index = 1, #all, 2 do
    local taker = string.match(all[index], '^taker:(.*)$')
    local at, had = string.match(all[index + 1], '^(%d+) (%d+)$')
    if at and taker and taker ~= engine then
      if math.abs(now - at) > SEEN then call('HDEL', state, all[index]) else loads[#loads + 1] = tonumber(had) end
    end
  end
  if #loads > 1 then
    table.sort(loads)
    local level, sum = 0, waiting
    for index = 1, #loads do
      -- Who has more than that already gets nothing of it.
      if index > 1 and loads[index] >= level then break end
      sum = sum + loads[index]
      level = math.ceil(sum / index)
    end
    count = math.max(0, math.min(count, level - load))
    others = count == 0
  end
end
local suspect, suspected = unpack(call('HMGET', state, 'suspect:' .. engine, 'suspected:' .. engine))
if suspect and (call('HGET', taken, suspect) ~= engine or now - whole(suspected, 0) >= tonumber(alone)) then
  call('HDEL', state, 'suspect:' .. engine, 'suspected:' .. engine)
  suspect = false
end
if not suspect then
  local trace = call('ZPOPMIN', suspects)[1]
  local entry = trace and entry_of(trace)
  if trace then waiting = waiting - 1 end
  if entry then
    size = entry[7]
    claim(trace, entry, engine)
    call('HSET', state, 'suspect:' .. engine, trace, 'suspected:' .. engine, string.format('%.0f', now))
    found[1] = shown(trace, entry, size <= inline)
  end
end
while #found < count do
  local client, at = unpack(call('ZPOPMIN', turns))
  if not client then break end
  local own = KEYS[8] .. client
  local place, priority = unpack(call('ZPOPMIN', own))
  local trace = place and string.sub(place, 17)
  local entry = place and entry_of(trace)
  if entry then
    local bytes = entry[7]
    size = size + bytes
    if #found > 0 and size > most then
      call('ZADD', own, priority, place)
      call('ZADD', turns, at, client)
      break
    end
    waiting = waiting - 1
    claim(trace, entry, engine)
    found[#found + 1] = shown(trace, entry, bytes <= inline)
    turn = turn + 1
    at = turn
  elseif place then
    -- Settled by somebody who had not taken it.
    waiting = waiting - 1
  end
  if call('EXISTS', own) == 1 then call('ZADD', turns, at, client) end
end

-- Begun with what is never refused. One that has no room left asks no more for a while.
call('HDEL', state, '')
if #found < tonumber(room) then
  call('HSET', state, 'taker:' .. engine, string.format('%.0f %d', now, load + #found))
else
  call('HDEL', state, 'taker:' .. engine)
end
if waiting ~= before then
  call('HSET', state, 'waiting', waiting, 'turn', turn, 'since', now)
  if #found > 0 then call('SADD', KEYS[12], engine) end
  if since then
    local span, taken_before = tonumber(was[4]) or 0, tonumber(was[5]) or 0
    call('HSET', state, 'span', span * 0.9 + now - since, 'count', taken_before * 0.9 + #found)
  end
  if waiting <= 0 then
    leave_nothing()
  elseif call('EXISTS', bell) == 0 then
    -- For the next engine, should a token have been lost.
    ring()
  end
end
if others and #found == 0 and call('EXISTS', turns) == 1 then
  -- The token that it came by is another's.
  ring()
  return 1
end
return found
""".replace("SEEN", str(round(_SEEN_S * 1e6)))
)

# Entries that an engine took and that are none of those it knows: the arguments from the seventh on. Sets its token.
_RECOVER: Final = Script(
    _COMMON
    + """
local token, engine, count, most, inline, valid = unpack(ARGV, 1, 6)
call('DEL', KEYS[11])
call('SET', KEYS[11], token, 'EX', valid)
count, most, inline = tonumber(count), tonumber(most), tonumber(inline)
local known = {}
for index = 7, #ARGV do known[ARGV[index]] = true end

local found, size = {}, 0
for _, one in ipairs(held_by(engine, known)) do
  local bytes = one[2][7]
  size = size + bytes
  if #found == count or #found > 0 and size > most then break end
  found[#found + 1] = shown(one[1], one[2], bytes <= inline)
end
return found
"""
)

# Entries that a holder has, up to `count`, or one of them, wait again, where they did: those that its loss was the last
# try of are given up. KEYS[11]: the holders. ARGV: holder, why, '1' if it was lost, who holds what is given up, one
# trace or '', most at once, the number of that trace's take or 0. Returns those that wait again, each with the number
# of its last take, and whether there is more.
_PUT_BACK: Final = Script(
    _COMMON
    + """
local holder, why, lost, given_up, only, count, attempt = unpack(ARGV)
call('HDEL', taken, '')
local held = {}
if only ~= '' then
  local entry = call('HGET', taken, only) == holder and entry_of(only)
  if entry and (attempt == '0' or attempt == tostring(entry[8] or 0)) then held[1] = {only, entry} end
else
  held = held_by(holder, {})
end
local was = call('HMGET', state, 'waiting', 'turn')
local waiting, turn, back = whole(was[1], 0), whole(was[2], 0), {}
for index = 1, math.min(#held, tonumber(count)) do
  local trace, entry = held[index][1], held[index][2]
  entry[11] = why
  if lost == '1' then entry[10] = (entry[10] or 0) + 1 end
  call('HSET', entries, trace, cmsgpack.pack(entry))
  if lost == '1' and entry[10] >= (entry[9] or 1) then
    call('HSET', taken, trace, given_up)
  else
    turn = join(trace, entry, call('ZCARD', KEYS[8] .. entry[3]), turn)
    call('HDEL', taken, trace)
    back[#back + 1] = {trace, entry[8] or 0}
    ring()
  end
end
if #back > 0 then call('HSET', state, 'waiting', waiting + #back, 'turn', turn) end
local more = #held > tonumber(count)
if only == '' and not more then
  call('SREM', KEYS[11], holder)
  call('HDEL', state, 'suspect:' .. holder, 'suspected:' .. holder, 'taker:' .. holder)
end
return {back, more and 1 or 0}
"""
)

# Who asks first does what one of many is to do, until it has not asked for so long. KEYS: who does. ARGV: who asks, for
# how many milliseconds. Begins with what is never refused.
_CARE: Final = Script(
    """
local who = redis.call('GET', KEYS[1])
if who and who ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
)

# What a holder has. ARGV: holder, most bytes in all, most bytes of one.
_HELD: Final = Script(
    _COMMON
    + """
return all_shown(ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]))
"""
)

# An entry leaves the queue, if `holder` (anybody: '') has it, from its take of this number (any: 0). Last where it is
# found again by: a crash between leaves nothing behind.
_SETTLE: Final = Script(
    """
local holder = redis.call('HGET', KEYS[3], ARGV[1])
if ARGV[2] ~= '' and holder ~= ARGV[2] then return 0 end
if ARGV[3] ~= '0' then
  -- Its holder may have it again, after others.
  local packed = redis.call('HGET', KEYS[2], ARGV[1])
  local fine, entry = pcall(cmsgpack.unpack, packed or '')
  if packed and fine and type(entry) == 'table' and tostring(entry[8] or 0) ~= ARGV[3] then return 0 end
end
for index = 1, 3 do redis.call('HDEL', KEYS[index], ARGV[1]) end
return 1
"""
)

# Told again to whoever asks again: an answer may be lost.
_WITHDRAW: Final = Script(
    _COMMON
    + """
local submitted, trace, remember = KEYS[11], ARGV[1], ARGV[2]
local entry = entry_of(trace)
if not entry then return call('GET', submitted) == 'withdrawn' and 1 or 0 end
if call('HEXISTS', taken, trace) == 1 then return 0 end
leave(trace, entry)
call('HDEL', data, trace)
call('HDEL', entries, trace)
call('SET', submitted, 'withdrawn', 'EX', remember)
return 1
"""
)

_WITHDRAW_LEASE: Final = Script(
    _COMMON
    + """
local lease, holder, most, inline = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
for _, trace in ipairs(call('SMEMBERS', KEYS[9] .. lease)) do
  local entry = entry_of(trace)
  if entry then
    leave(trace, entry)
    call('HSET', taken, trace, holder)
  else
    -- Settled by somebody who had not taken it.
    leave_lease(trace, lease)
  end
end

return all_shown(holder, most, inline)
"""
)


# An engine says again that it runs an entry, which a server that came back may have forgotten in part or whole. Begins
# with what is never refused. KEYS[11], [12]: the entry's mark, the holders. ARGV: trace, engine, attempt, schema,
# micros, client, priority, lease, tries, lost, why, how long to remember, data. Returns whether it is its own.
_CLAIM: Final = Script(
    _COMMON
    + """
local trace, engine, attempt = ARGV[1], ARGV[2], tonumber(ARGV[3])
call('HDEL', taken, '')
local holder, entry = call('HGET', taken, trace), entry_of(trace)
if holder and holder ~= engine then return 0 end
if entry and (entry[8] or 0) > attempt then return 0 end
if not entry then
  if holder then return 0 end
  local number = whole(call('HGET', state, 'number'), 0) + 1
  call('HSET', state, 'number', number)
  entry = {
    ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8], number, #ARGV[13], attempt,
    tonumber(ARGV[9]), tonumber(ARGV[10]), ARGV[11]
  }
  call('HSET', data, trace, ARGV[13])
elseif not holder then
  leave(trace, entry)
end
entry[8] = attempt
call('SET', KEYS[11], 1, 'EX', ARGV[12])
call('HSET', entries, trace, cmsgpack.pack(entry))
call('HSET', taken, trace, engine)
call('SADD', KEYS[12], engine)
return 1
"""
)


# An entry becomes a dead letter, once. KEYS: dead letters, mark. ARGV: how long to remember the mark, how many letters
# are kept, then the letter's fields. Begins with what is never refused.
_DEAD_LETTER: Final = Script(
    """
if redis.call('EXPIRE', KEYS[2], ARGV[1]) == 1 then return 0 end
redis.call('DEL', KEYS[2])
redis.call('SET', KEYS[2], 1, 'EX', ARGV[1])
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', unpack(ARGV, 3))
return 1
"""
)


class QueueFull(BusError):
    """The queue takes no more of this client's submissions now.

    Attributes:
        waiting: how many wait.
        limit: how many may.
        retry_after_s: seconds until there is room again, if entries go on being taken as they were of late.
    """

    def __init__(self, model: str, waiting: int, limit: int, retry_after_s: float) -> None:
        self.waiting = waiting
        self.limit = limit
        self.retry_after_s = retry_after_s
        super().__init__(f"{waiting} submissions wait for {model!r}, the limit is {limit}")


@dataclass(frozen=True, slots=True)
class Taken:
    """An entry as it was queued. It may be anything: whoever took it decodes it.

    Its fields are `v` (the submission's schema), `t` (its trace's id) and `d` (the encoded submission). `trace` is the
    id as text, in which bytes that are not UTF-8 are surrogates. `queued_at` is when it was queued, in seconds since
    the epoch by Redis's clock. `attempt` counts how often it was taken, this time included; `tries` is how many engines
    may be lost over it, `lost` how many were, `why` what became of the last one that had it.
    """

    trace: str
    fields: dict[bytes, bytes]
    queued_at: float
    attempt: int = 1
    tries: int = 1
    lost: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A queue entry that nobody could answer, or whose engines were lost as often as it may be tried.

    `id` names it among the dead letters; `time` is when it came there, in seconds since the epoch by Redis's clock.
    `schema` and `data` are the submission as it was queued, and may be anything.
    """

    id: str
    time: float
    model: str
    trace: str
    reason: str
    schema: str
    data: bytes


def _dead_letter(id_: bytes, flat: Sequence[bytes]) -> DeadLetter:
    fields = dict(zip(flat[::2], flat[1::2], strict=True))

    def shown(name: bytes) -> str:
        return fields.get(name, b"").decode("utf-8", "replace")

    milliseconds = int(id_.partition(b"-")[0])
    return DeadLetter(
        id=id_.decode(),
        time=milliseconds / 1000,
        model=shown(b"model"),
        trace=_text(fields.get(b"entry", b"")),
        reason=shown(b"reason"),
        schema=shown(b"v"),
        data=fields.get(b"d", b""),
    )


def settling(keys: Keys, model: str, trace: str, holder: str = "", attempt: int = 0) -> tuple[Any, ...]:
    """The command by which an entry that was taken leaves the queue, if `holder` has it (anybody, without), from the
    take of this number (any, without).

    It may be carried out again.
    """
    names = [keys.queue(model, part) for part in ("data", "entries", "taken")]
    return AfterOthers(_SETTLE(names, _bytes(trace), holder, attempt))


def claiming(
    keys: Keys, model: str, engine: str, taken: Taken, *, client: str, priority: int, lease: str
) -> tuple[Any, ...]:
    """The command by which an engine says again that it runs what it has taken; nothing where it is another's by now.

    `client`, `priority` and `lease` are the submission's, should the whole entry be lost. It may be carried out again.
    """
    names = [*_names(keys, model), keys.submitted(model, taken.trace), keys.queue(model, "holders")]
    return _CLAIM(
        [name.encode("utf-8", "surrogateescape") for name in names],
        *(_bytes(taken.trace), engine, taken.attempt, taken.fields.get(b"v", b""), round(taken.queued_at * 1e6)),
        *(client, max(-_MOST_PRIORITY, min(priority, _MOST_PRIORITY)), lease, taken.tries, taken.lost, taken.why),
        *(REMEMBER_S, taken.fields.get(b"d", b"")),
    )


class Queue:
    """The queues on one Redis."""

    def __init__(self, connections: Connections, keys: Keys) -> None:
        self._connections = connections
        self._keys = keys
        self._intakes: dict[tuple[str, str], _Intake] = {}

    async def aclose(self) -> None:
        """Close the engines' connections. What is taken stays so."""
        intakes = list(self._intakes.values())
        self._intakes.clear()
        for intake in intakes:
            await intake.link.drop()

    async def put(
        self,
        model: str,
        trace: str,
        data: bytes,
        *,
        schema: str | None = None,
        client: str = "",
        priority: int = 0,
        lease: str = "",
        limit: int | None = None,
        tries: int = 1,
        before: Sequence[tuple[Any, ...]] = (),
    ) -> list[Any]:
        """Queue a trace's submission. A trace that was put before is not queued again, also when it has ended since.

        With `limit` entries waiting it is refused, but for a client that has fewer waiting than its share, the limit
        over the number of clients with waiting entries (itself included): that one is refused at twice the limit.
        `tries` is how many engines may be lost over it until it is given up.

        `before` are commands that go to Redis ahead of it, in one round trip; they may be carried out twice. Returns
        their replies, and whether the trace was put before.

        Raises:
            QueueFull: it was refused.
            BusFull: Redis has no memory left.
            BusError: Redis refused it.
            BusUnavailable: Redis stayed away; it may have been queued, and can be put again.
        """
        call = _PUT(
            [*_names(self._keys, model), self._keys.submitted(model, trace)],
            *(trace, schema or schema_text(), client, max(-_MOST_PRIORITY, min(priority, _MOST_PRIORITY)), lease),
            *(limit or 0, REMEMBER_S, max(1, tries), data),
        )
        *replies, refused = await self._connections.commands(*before, AfterOthers(call), refuse_full=True)
        if isinstance(refused, list):
            waiting, retry_ms = refused
            raise QueueFull(model, waiting, limit or 0, retry_ms / 1000)
        return [*replies, bool(refused)]

    async def take(self, model: str, engine: str, count: int, block_ms: int, room: int | None = None) -> list[Taken]:
        """Up to `count` entries that no engine has taken, clients in turns, waiting up to `block_ms` for the first.

        `room` is how many the engine could take, if that is more. Engines that take get equally many: one that has more
        than others leaves them what waits for a moment.

        They stay `engine`'s until it calls `done` or `dead_letter`. What was taken by a call that was cancelled or
        lost its connection, or by an earlier process under this engine's name, comes with a later one. Fewer come
        where their data is more than some 8 MiB. While Redis is away it returns nothing. Not for concurrent use by one
        engine.
        """
        intake = self._intakes.get((model, engine))
        if intake is None:
            names = [*_names(self._keys, model), self._keys.queue(model, f"engine:{engine}")]
            names.append(self._keys.queue(model, "holders"))
            guard = self._connections.guard
            intake = self._intakes[model, engine] = _Intake(self._connections.link(), names, engine, guard)
        return await intake.take(count, block_ms, count if room is None else room)

    async def done(self, model: str, trace: str, holder: str = "", attempt: int = 0) -> None:
        """Settle an entry that was taken: it leaves the queue, if `holder` has it (anybody, without), from the take
        numbered `attempt` (any, without). Idempotent.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        await self._connections.command(*settling(self._keys, model, trace, holder, attempt))
        self.settled(model, trace)

    async def holders(self, model: str) -> list[str]:
        """The engines that have taken entries, and may have some still.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        key = self._keys.queue(model, "holders")
        found = await self._connections.command("SMEMBERS", key)
        return [name for one in found if (name := self._connections.guard.read(bytes.decode, one, key=key, entry=one))]

    async def cares(self, model: str, role: str, who: str) -> bool:
        """Whether `who`, of all in this role, is to look at whatever is taken. One at a time is enough: it takes the
        longer, the more there is. It stays so for who asks again within `CARE_S` seconds.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        key = self._keys.queue(model, f"caretaker:{role}")
        return bool(await self._connections.command(*_CARE((key,), who, round(CARE_S * 1000))))

    async def put_back(
        self,
        model: str,
        holder: str,
        why: str,
        *,
        lost: bool,
        trace: str = "",
        attempt: int = 0,
        which: list[tuple[str, int]] | None = None,
    ) -> int:
        """Let everything (or one trace) that `holder` has taken wait again, ahead of what its clients queued later.

        One trace only if it has it from the take numbered `attempt`, if that is given.

        With `lost` it counts as a try of each, and those that had no other left are given up instead. Whoever held them
        holds them no more. Returns how many wait again; `which` gains them, each with the attempt that is over.

        Raises:
            BusUnavailable: Redis stayed away; it may have been done.
        """
        names = [*_names(self._keys, model), self._keys.queue(model, "holders")]
        back = 0
        while True:
            call = _PUT_BACK(
                names, holder, why[:1000], "1" if lost else "", _GIVEN_UP, _bytes(trace), _PUT_BACK_AT_ONCE, attempt
            )
            some, more = await self._connections.command(*call)
            back += len(some)
            if which is not None:
                which += [(_text(one), int(number)) for one, number in some]
            if not more:
                return back

    async def still_waiting(self, model: str, traces: Sequence[str]) -> set[str]:
        """Those of these traces that wait, and that no engine has taken.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        if not traces:
            return set()
        entries, taken = (self._keys.queue(model, part) for part in ("entries", "taken"))
        names = list(map(_bytes, traces))
        there, holders = await self._connections.commands(("HMGET", entries, *names), ("HMGET", taken, *names))
        return {
            trace
            for trace, entry, holder in zip(traces, there, holders, strict=True)
            if entry is not None and holder is None
        }

    async def given_up(self, model: str) -> list[Taken]:
        """What was given up, in the order it came, until it is settled. Large ones come without their data.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        call = _HELD(_names(self._keys, model), _GIVEN_UP, _TAKE_BYTES, _INLINE_BYTES)
        return self._all_taken(model, await self._connections.command(*call, alone=True))

    def _all_taken(self, model: str, replies: Sequence[Sequence[Any]]) -> list[Taken]:
        key = self._keys.queue(model, "entries")
        return [_taken(self._connections.guard, key, *one) for one in replies]

    def forgo(self, model: str, engine: str, trace: str) -> None:
        """Have an entry that `engine` took come again with a later `take`, under the same attempt."""
        intake = self._intakes.get((model, engine))
        if intake is not None:
            intake.forgo(trace)

    def settled(self, model: str, trace: str) -> None:
        """An entry has left the queue by the command of `settling`, or is somebody else's."""
        for (of, _), intake in self._intakes.items():
            if of == model:
                intake.claimed.discard(trace)

    async def dead_letter(self, model: str, taken: Taken, reason: str) -> None:
        """Move an entry that cannot be answered to the dead letters, with its fields, its model, its id and the reason.

        It may be asked again after a crash or a lost answer: an entry becomes one letter.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        fields = [part for field in taken.fields.items() for part in field]
        if b"d" not in taken.fields:
            data = await self._connections.command(
                "HGET", self._keys.queue(model, "data"), _bytes(taken.trace), alone=True
            )
            fields += [b"d", data or b""]
        call = _DEAD_LETTER(
            (self._keys.dead(), _bytes(self._keys.dead_mark(model, taken.trace))),
            *(REMEMBER_S, _DEAD_LETTERS),
            *("model", model, "entry", _bytes(taken.trace), "reason", reason[:1000], *fields),
        )
        await self._connections.command(*call)
        await self.done(model, taken.trace)

    async def dead_letters(self, after: str = "", count: int = 100) -> list[DeadLetter]:
        """Dead letters, the oldest first: up to `count` of those after the one of id `after` (`""`: from the first on).

        Raises:
            BusError: `after` is no id.
            BusUnavailable: Redis stayed away.
        """
        start = f"({after}" if after else "-"
        found = await self._connections.command("XRANGE", self._keys.dead(), start, "+", "COUNT", count, alone=True)
        return [_dead_letter(*one) for one in found]

    async def find_dead_letter(self, id_: str) -> DeadLetter | None:
        """The dead letter of this id, if it is there.

        Raises:
            BusError: `id_` is no id.
            BusUnavailable: Redis stayed away.
        """
        found = await self._connections.command("XRANGE", self._keys.dead(), id_, id_, alone=True)
        return _dead_letter(*found[0]) if found else None

    async def drop_dead_letter(self, id_: str) -> bool:
        """Remove a dead letter. Returns whether it was there.

        Raises:
            BusError: `id_` is no id.
            BusUnavailable: Redis stayed away; it may have been removed.
        """
        # Asked on its own: a removal whose reply was lost is sent again and finds nothing.
        there = await self._connections.command("XRANGE", self._keys.dead(), id_, id_)
        await self._connections.command("XDEL", self._keys.dead(), id_)
        return bool(there)

    async def withdraw(self, model: str, trace: str) -> bool:
        """Remove an entry that waits. False where it is taken, or was never put.

        Idempotent: it stays true of a trace that was withdrawn.

        Raises:
            BusUnavailable: Redis stayed away; it may have been removed.
        """
        submitted = _bytes(self._keys.submitted(model, trace))
        call = _WITHDRAW([*_names(self._keys, model), submitted], _bytes(trace), REMEMBER_S)
        return bool(await self._connections.command(*call))

    async def leases(self, model: str) -> list[str]:
        """The leases that entries wait under, or were withdrawn under and are not settled, in no order.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        waiting, holders = await self._connections.commands(
            ("SMEMBERS", self._keys.queue(model, "leases")), ("HVALS", self._keys.queue(model, "taken"))
        )
        mark = _holder("")
        withdrawn = {holder.removeprefix(mark) for holder in holders if holder.startswith(mark)}
        return [_text(lease) for lease in {*waiting, *withdrawn}]

    async def withdraw_lease(self, model: str, lease: str) -> list[Taken]:
        """Withdraw all entries that wait under a lease, and return them in the order they came.

        No engine takes them any more. They come again with the next call until they are settled, by `done` or with
        their final, so that none is forgotten whose answer was lost. Large ones come without their data `d`: more than
        64 KiB each, or what goes beyond 8 MiB in all.

        Raises:
            BusUnavailable: Redis stayed away; they may have been withdrawn.
        """
        call = _WITHDRAW_LEASE(_names(self._keys, model), _bytes(lease), _holder(lease), _TAKE_BYTES, _INLINE_BYTES)
        return self._all_taken(model, await self._connections.command(*call, alone=True))

    async def waiting(self, model: str) -> int:
        """How many entries wait.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        key = self._keys.queue(model, "state")
        found = await self._connections.command("HGET", key, "waiting")
        return self._connections.guard.read(integer, found or 0, -GREATEST, key=key, entry="waiting") or 0

    async def clients(self, model: str) -> dict[str, int]:
        """How many entries of each client wait, in the order of their turns.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        clients = await self._connections.command("ZRANGE", self._keys.queue(model, "turns"), 0, -1)
        own = self._keys.queue(model, "client:").encode()
        counts = await self._connections.commands(*(("ZCARD", own + client) for client in clients)) if clients else []
        return {_text(client): count for client, count in zip(clients, counts, strict=True) if count}


@lru_cache(maxsize=256)
def _names(keys: Keys, model: str) -> tuple[str, ...]:
    """What every script is given first."""
    return tuple(keys.queue(model, part) for part in _PARTS)


#: Stands for nothing taken, because others are to take it.
_LATER: Final[list[Taken]] = []


class _Intake:
    """One engine's claims on one queue."""

    def __init__(self, link: Link, names: Sequence[str], engine: str, guard: Guard) -> None:
        self.link = link
        self._guard = guard
        self._names = names
        self._data, self._bell = (names[_PARTS.index(part)] for part in ("data", "bell"))
        self._engine = engine
        #: Traces handed out and not settled yet.
        self.claimed: set[str] = set()
        #: Redis may hold entries of ours that were never handed out.
        self._lost = True
        #: Something that was handed out is to be so again.
        self._again = False
        self._token = ""
        self._backoff = Backoff()

    def forgo(self, trace: str) -> None:
        """What was handed out is to be handed out again."""
        self.claimed.discard(trace)
        self._again = True

    async def take(self, count: int, block_ms: int, room: int) -> list[Taken]:
        deadline = anyio.current_time() + block_ms / 1000
        wait_s, patient = 0.0, 1
        while True:
            try:
                if self._lost or self._again:
                    self._lost, self._again = True, False
                    self._token = uuid.uuid4().hex
                    found = await self._ask(self._recovery(count))
                    # Lost still if there is any: there may be more.
                    if found:
                        return found
                # Settled only once its reply is here: a call that is cancelled leaves claims behind.
                self._lost = True
                more = round(SUSPECT_S * 1e6), len(self.claimed), patient, room
                found = await self._ask(self._call(_TAKE, count, *more), wait_s)
                if found is None:
                    continue
                self._lost = False
                if found is _LATER:
                    await anyio.sleep(_YIELD_S)
                    wait_s, patient = 0.0, 0
                    continue
                patient = 1
                self._backoff.reset()
                # What is left of the last millisecond is no time to wait, and 0 would be for ever.
                wait_s = min(deadline - anyio.current_time(), _POLL_S)
                if found or wait_s < 0.001:
                    return found
            except Exception as error:
                if not is_transient(error):
                    raise as_bus_error(error) from error
                pause = self._backoff.next()
                logger.log(self._backoff.level, "the intake of %s waits for Redis: %s", self._bell, error)
                await anyio.sleep(min(pause, max(0.05, deadline - anyio.current_time())))
                if anyio.current_time() >= deadline:
                    return []
                wait_s = 0.0

    def _call(self, script: Script, count: int, *more: Any) -> tuple[Any, ...]:
        return script(self._names, self._token, self._engine, count, _TAKE_BYTES, _INLINE_BYTES, *more)

    def _recovery(self, count: int) -> tuple[Any, ...]:
        return self._call(_RECOVER, count, _TOKEN_S, *map(_bytes, self.claimed))

    async def _ask(self, call: Sequence[Any], wait_s: float = 0.0) -> list[Taken] | None:
        """Ask, after waiting for the bell; None where our token is not valid any more. What came is ours."""
        # In one go, so that whoever hears the bell takes what it rang for.
        wait = [("BLPOP", self._bell, wait_s)] if wait_s else []
        *_, reply = await self._replies(*wait, call, timeout_s=wait_s + 30)
        if reply is None:
            return None
        if reply == 1:
            return _LATER
        large = [one for one in reply if one[3] is None]
        if large:
            (bodies,) = await self._replies(("HMGET", self._data, *(one[0] for one in large)), timeout_s=30)
            for one, body in zip(large, bodies, strict=True):
                one[3] = body
        taken = [_taken(self._guard, self._names[0], *one) for one in reply]
        self.claimed.update(one.trace for one in taken)
        return taken

    async def _replies(self, *commands: Sequence[Any], timeout_s: float) -> list[Any]:
        replies = await self.link.ask(*commands, timeout_s=timeout_s)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies


def _taken(
    guard: Guard,
    key: str,
    trace: bytes,
    schema: bytes,
    micros: bytes,
    data: bytes | None,
    attempt: int,
    tries: int,
    lost: int,
    why: bytes,
) -> Taken:
    fields = {b"v": schema, b"t": trace} | ({} if data is None else {b"d": data})
    # An entry that does not say when it was queued is one all the same.
    queued = guard.read(integer, micros, key=key, entry=trace) or 0
    return Taken(_text(trace), fields, queued / 1e6, attempt, tries, lost, why.decode("utf-8", "replace"))


def _holder(lease: str) -> bytes:
    """Who holds what was withdrawn under a lease: no engine is called so."""
    return b"\0" + _bytes(lease)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
