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
from collections.abc import Sequence
from typing import Any, Final

from tracewire_bus.transport.guard import GREATEST, integer
from tracewire_bus.transport.link import AfterOthers
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.scripts import Script
from tracewire_bus.wire.codec import request_schema_text

from .dead_letters import DeadLetters
from .intake import Intake
from .keys import Keys
from .queue_entries import (
    INLINE_BYTES,
    REMEMBER_S,
    TAKE_BYTES,
    QueueFull,
    Taken,
    queue_names,
    taken_entry,
    to_bytes,
    to_text,
)

__all__ = ["Queue", "claim_command", "settle_command"]

logger = logging.getLogger("tracewire")

#: Who holds what was given up: no engine is called so, nor is a lease held by such a name.
_GIVEN_UP: Final = b"\1given up"

#: How long one of many looks after a queue for all of them without saying so again, in seconds.
CARE_S: Final = 2.5

#: How many entries one call of a script puts back.
_PUT_BACK_AT_ONCE: Final = 100

#: Greatest priority, either way, that a sorted set tells from its neighbour.
_MOST_PRIORITY: Final = 2**53

_PUT: Final = Script("queue_put")

_PUT_BACK: Final = Script("queue_put_back")

_CARE: Final = Script("queue_acquire_role")

_HELD: Final = Script("queue_held")

_SETTLE: Final = Script("queue_settle")

_WITHDRAW: Final = Script("queue_withdraw")

_WITHDRAW_LEASE: Final = Script("queue_withdraw_lease")

_CLAIM: Final = Script("queue_claim")


def settle_command(keys: Keys, model: str, trace: str, holder: str = "", attempt: int = 0) -> tuple[Any, ...]:
    """The command by which an entry that was taken leaves the queue, if `holder` has it (anybody, without), from the
    take of this number (any, without).

    It may be carried out again.
    """
    names = [keys.queue(model, part) for part in ("data", "entries", "taken")]
    return AfterOthers(_SETTLE(names, to_bytes(trace), holder, attempt))


def claim_command(
    keys: Keys, model: str, engine: str, taken: Taken, *, client: str, priority: int, lease: str
) -> tuple[Any, ...]:
    """The command by which an engine says again that it runs what it has taken; nothing where it is another's by now.

    `client`, `priority` and `lease` are the submission's, should the whole entry be lost. It may be carried out again.
    """
    names = [*queue_names(keys, model), keys.submitted(model, taken.trace), keys.queue(model, "holders")]
    return _CLAIM(
        [name.encode("utf-8", "surrogateescape") for name in names],
        *(to_bytes(taken.trace), engine, taken.attempt, taken.fields.get(b"v", b""), round(taken.queued_at * 1e6)),
        *(client, max(-_MOST_PRIORITY, min(priority, _MOST_PRIORITY)), lease, taken.tries, taken.lost, taken.why),
        *(REMEMBER_S, taken.fields.get(b"d", b"")),
    )


class Queue:
    """The queues on one Redis."""

    def __init__(self, connections: Connections, keys: Keys) -> None:
        self._connections = connections
        self._keys = keys
        self._dead_letters = DeadLetters(connections, keys)
        self._intakes: dict[tuple[str, str], Intake] = {}

    async def aclose(self) -> None:
        """Close the engines' connections. What is taken stays so."""
        intakes = list(self._intakes.values())
        self._intakes.clear()
        for intake in intakes:
            await intake.link.drop()

    # whole: what an entry may say, by keywords with their defaults
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
            [*queue_names(self._keys, model), self._keys.submitted(model, trace)],
            *(
                trace,
                schema or request_schema_text(),
                client,
                max(-_MOST_PRIORITY, min(priority, _MOST_PRIORITY)),
                lease,
            ),
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
            names = [*queue_names(self._keys, model), self._keys.queue(model, f"engine:{engine}")]
            names.append(self._keys.queue(model, "holders"))
            guard = self._connections.guard
            intake = self._intakes[model, engine] = Intake(self._connections.link(), names, engine, guard)
        return await intake.take(count, block_ms, count if room is None else room)

    async def done(self, model: str, trace: str, holder: str = "", attempt: int = 0) -> None:
        """Settle an entry that was taken: it leaves the queue, if `holder` has it (anybody, without), from the take
        numbered `attempt` (any, without). Idempotent.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        await self._connections.command(*settle_command(self._keys, model, trace, holder, attempt))
        self.settled(model, trace)

    async def holders(self, model: str) -> list[str]:
        """The engines that have taken entries, and may have some still.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        key = self._keys.queue(model, "holders")
        found = await self._connections.command("SMEMBERS", key)
        return [name for one in found if (name := self._connections.guard.read(bytes.decode, one, key=key, entry=one))]

    async def acquire_role(self, model: str, role: str, who: str) -> bool:
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
        names = [*queue_names(self._keys, model), self._keys.queue(model, "holders")]
        back = 0
        while True:
            call = _PUT_BACK(
                names, holder, why[:1000], "1" if lost else "", _GIVEN_UP, to_bytes(trace), _PUT_BACK_AT_ONCE, attempt
            )
            some, more = await self._connections.command(*call)
            back += len(some)
            if which is not None:
                which += [(to_text(one), int(number)) for one, number in some]
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
        names = list(map(to_bytes, traces))
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
        call = _HELD(queue_names(self._keys, model), _GIVEN_UP, TAKE_BYTES, INLINE_BYTES)
        return self._all_taken(model, await self._connections.command(*call, alone=True))

    def _all_taken(self, model: str, replies: Sequence[Sequence[Any]]) -> list[Taken]:
        key = self._keys.queue(model, "entries")
        return [taken_entry(self._connections.guard, key, one) for one in replies]

    def redeliver(self, model: str, engine: str, trace: str) -> None:
        """Have an entry that `engine` took come again with a later `take`, under the same attempt."""
        intake = self._intakes.get((model, engine))
        if intake is not None:
            intake.redeliver(trace)

    def settled(self, model: str, trace: str) -> None:
        """An entry has left the queue by the command of `settling`, or is somebody else's."""
        for (of, _), intake in self._intakes.items():
            if of == model:
                intake.claimed.discard(trace)

    async def dead_letter(self, model: str, taken: Taken, reason: str) -> None:
        """Move an entry that cannot be answered to the dead letters.

        The call may be repeated after a crash or a lost reply: an entry becomes one letter.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        data = None
        if b"d" not in taken.fields:
            name = self._keys.queue(model, "data")
            data = await self._connections.command("HGET", name, to_bytes(taken.trace), alone=True) or b""
        await self._dead_letters.add(model, taken, reason, data)
        await self.done(model, taken.trace)

    async def withdraw(self, model: str, trace: str) -> bool:
        """Remove an entry that waits. False where it is taken, or was never put.

        Idempotent: it stays true of a trace that was withdrawn.

        Raises:
            BusUnavailable: Redis stayed away; it may have been removed.
        """
        submitted = to_bytes(self._keys.submitted(model, trace))
        call = _WITHDRAW([*queue_names(self._keys, model), submitted], to_bytes(trace), REMEMBER_S)
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
        return [to_text(lease) for lease in {*waiting, *withdrawn}]

    async def withdraw_lease(self, model: str, lease: str) -> list[Taken]:
        """Withdraw all entries that wait under a lease, and return them in the order they came.

        No engine takes them any more. They come again with the next call until they are settled, by `done` or with
        their final, so that none is forgotten whose answer was lost. Large ones come without their data `d`: more than
        64 KiB each, or what goes beyond 8 MiB in all.

        Raises:
            BusUnavailable: Redis stayed away; they may have been withdrawn.
        """
        call = _WITHDRAW_LEASE(
            queue_names(self._keys, model), to_bytes(lease), _holder(lease), TAKE_BYTES, INLINE_BYTES
        )
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
        return {to_text(client): count for client, count in zip(clients, counts, strict=True) if count}


def _holder(lease: str) -> bytes:
    """Who holds what was withdrawn under a lease: no engine is called so."""
    return b"\0" + to_bytes(lease)
