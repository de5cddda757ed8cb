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

_PUT: Final = Script("queue_put")
_TAKE: Final = Script("queue_take")
_RECOVER: Final = Script("queue_recover")
_PUT_BACK: Final = Script("queue_put_back")
_CARE: Final = Script("queue_acquire_role")
_HELD: Final = Script("queue_held")
_SETTLE: Final = Script("queue_settle")
_WITHDRAW: Final = Script("queue_withdraw")
_WITHDRAW_LEASE: Final = Script("queue_withdraw_lease")
_CLAIM: Final = Script("queue_claim")
_DEAD_LETTER: Final = Script("dead_letter_add")


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
