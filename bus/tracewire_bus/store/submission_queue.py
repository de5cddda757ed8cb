"""Queues of submissions, one for each model: bounded, and fair between clients.

**Order.** Clients with waiting entries form a ring. A take hands out one entry of the client whose turn it is and moves
that client to the end of the ring. A client that submits again joins at the end. So each other client is served at most
once before a client's first entry, and a client gains nothing by leaving and returning. A client's own entries go by
priority, lower numbers first, then in the order of submission.

**Attempts.** A taken entry belongs to its engine until the engine settles it, or until it is put back at its old place:
by its engine, when that shuts down, or by a process that finds the engine's registry entry expired (`put_back`). Each
take gives the entry a new number. The number is the attempt under which the trace runs, and it fences earlier engines.

**Lost engines.** After `max_attempts` lost engines an entry is *given up*: it is held under a mark instead of an engine
until a process has ended its trace (`tracewire_bus.recovery`). An entry with one attempt left is a *suspect*. Suspects
wait apart, and an engine gets one at a time, so that one bad trace does not use up the attempts of the traces beside
it. After a minute (`intake.SUSPECT_S`) an engine gets another one, although the first still runs.

**Lost replies.** A cancelled take, or one whose connection broke, may have taken entries in Redis that no caller got.
The engine's next take recovers them. It first puts a new token into Redis, and Redis ignores takes under an old token,
so a take that is still on its way has no effect.

**Waiting.** Each put adds a token to a list, the *bell*, that engines without work block on, so that one submission
wakes one engine. The bell is empty when no entry waits.

All keys of a queue share the model's hash tag. The scripts themselves build the keys of clients and leases from names,
since only Redis knows whose turn it is.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any, Final

from tracewire_bus.transport.errors import BusError
from tracewire_bus.transport.guard import GREATEST, integer
from tracewire_bus.transport.link import AfterOthers
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.scripts import Script
from tracewire_bus.wire.codec import request_schema_text
from tracewire_bus.wire.packing import decoder

from .dead_letters import DeadLetters
from .intake import Intake
from .keys import Keys
from .queue_entries import (
    INLINE_BYTES,
    REMEMBER_S,
    TAKE_BYTES,
    QueueFull,
    SubmissionRefused,
    Taken,
    queue_names,
    taken_entry,
    to_bytes,
    to_text,
)

__all__ = ["Queue", "claim_command", "settle_command"]

logger = logging.getLogger("tracewire")

#: What `queue_put.lua` answers to a submission that exceeds a limit: the limit's name, and why.
_LIMIT = re.compile(r"LIMIT ([\w-]+): (.+)", re.DOTALL)
#: The holder of entries that were given up. No engine has this name, and no withdrawn lease has this mark.
_GIVEN_UP: Final = b"\1given up"

#: How long a process keeps a role without acquiring it again, in seconds.
ROLE_S: Final = 2.5

#: Number of entries that one call of the script puts back at most.
_PUT_BACK_AT_ONCE: Final = 100

#: Greatest magnitude of a priority: a sorted set holds doubles, which cannot tell greater integers apart.
_MAX_PRIORITY: Final = 2**53

_PUT: Final = Script("queue_put")

_PUT_BACK: Final = Script("queue_put_back")

_ACQUIRE_ROLE: Final = Script("queue_acquire_role")

_HELD: Final = Script("queue_held")

_SETTLE: Final = Script("queue_settle")

_WITHDRAW: Final = Script("queue_withdraw")

_WITHDRAW_LEASE: Final = Script("queue_withdraw_lease")

_CLAIM: Final = Script("queue_claim")

_HAND_OVER: Final = Script("queue_hand_over")


def settle_command(keys: Keys, model: str, trace: str, holder: str = "", attempt: int = 0) -> tuple[Any, ...]:
    """The command that settles a taken entry, which then leaves the queue. Redis may execute it more than once.

    With `holder`, only an entry that this engine holds is settled; with `attempt`, only one of this attempt.
    """
    names = [keys.queue(model, part) for part in ("data", "entries", "taken")]
    return AfterOthers(_SETTLE(names, to_bytes(trace), holder, attempt))


def claim_command(
    keys: Keys, model: str, engine: str, taken: Taken, *, client: str, priority: int, lease: str
) -> tuple[Any, ...]:
    """The command by which an engine claims again an entry that it has taken, for a Redis that may have lost the claim.

    The command does nothing if another engine has the entry by now. If Redis has lost the whole entry, the command
    writes it again, with the submission's `client`, `priority` and `lease`. Redis may execute it more than once.
    """
    names = [*queue_names(keys, model), keys.submitted(model, taken.trace), keys.queue(model, "holders")]
    return _CLAIM(
        [name.encode("utf-8", "surrogateescape") for name in names],
        *(to_bytes(taken.trace), engine, taken.attempt, taken.fields.get(b"v", b""), round(taken.queued_at * 1e6)),
        *(client, max(-_MAX_PRIORITY, min(priority, _MAX_PRIORITY)), lease, taken.tries, taken.lost, taken.why),
        *(REMEMBER_S, taken.fields.get(b"d", b"")),
    )


#: How many digits stand before the trace in the member of a client's set, and what an entry is packed as.
_NUMBER_DIGITS: Final = 16
_decode_entry = decoder(list[Any], plain=True)


class Queue:
    """The queues of all models on one bus."""

    def __init__(self, connections: Connections, keys: Keys) -> None:
        self._connections = connections
        self._keys = keys
        self._dead_letters = DeadLetters(connections, keys)
        self._intakes: dict[tuple[str, str], Intake] = {}

    async def aclose(self) -> None:
        """Close the connections of the intakes. Taken entries stay taken."""
        intakes = list(self._intakes.values())
        self._intakes.clear()
        for intake in intakes:
            await intake.link.drop()

    async def submitted(self, *traces: tuple[str, str]) -> set[str]:
        """Those of these pairs of model and trace whose submission Redis remembers. Returns the traces.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        if not traces:
            return set()
        marks = (("EXISTS", self._keys.submitted(model, trace)) for model, trace in traces)
        replies = await self._connections.commands(*marks)
        return {trace for (_, trace), reply in zip(traces, replies, strict=True) if reply}

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
        """Queue a trace's submission. A trace id that was put before, even if its trace has ended, is not queued again.

        Args:
            model: the queue's model.
            trace: the trace's id.
            data: the encoded submission.
            schema: the schema of `data`, by default this version's.
            client: name of the client that submits, whose turn the entry waits for.
            priority: orders the client's own entries, lower first; clipped to ±2**53.
            lease: the client's lease, `""` for a detached trace.
            limit: how many entries may wait; None or 0 for any number. A client that has fewer waiting entries than its
                share is refused at twice the limit only. Its share is the limit divided by the number of clients with
                waiting entries, this client included.
            tries: how many engines may be lost over the entry before it is given up.
            before: commands to send ahead in the same round trip. Redis may execute them more than once.

        Returns:
            The replies to `before`, then a bool: whether the trace id was put before and has left the queue since.

        Raises:
            QueueFull: too many entries wait.
            SubmissionRefused: it exceeds a limit that the model's engines have published.
            BusFull: Redis has no memory left.
            BusError: Redis refuses.
            BusUnavailable: Redis does not answer. The entry may have been queued; the call may be repeated.
        """
        call = _PUT(
            [*queue_names(self._keys, model), self._keys.submitted(model, trace)],
            *(
                trace,
                schema or request_schema_text(),
                client,
                max(-_MAX_PRIORITY, min(priority, _MAX_PRIORITY)),
                lease,
            ),
            *(limit or 0, REMEMBER_S, max(1, tries), data),
        )
        try:
            *replies, refused = await self._connections.commands(*before, AfterOthers(call), refuse_full=True)
        except BusError as error:
            if (exceeded := _LIMIT.fullmatch(str(error.__cause__))) is not None:
                raise SubmissionRefused(exceeded[1], exceeded[2]) from error
            raise
        if isinstance(refused, list):
            waiting, retry_ms = refused
            raise QueueFull(model, waiting, limit or 0, retry_ms / 1000)
        return [*replies, bool(refused)]

    async def take(self, model: str, engine: str, count: int, block_ms: int, room: int | None = None) -> list[Taken]:
        """Take up to `count` waiting entries; clients take turns. Waits up to `block_ms` milliseconds for the first.

        `room` is the number of further entries that the engine could run, if that is more than `count`. Redis spreads
        entries evenly: an engine with more entries than others leaves waiting entries to them for 30 ms.

        The entries belong to `engine` until it calls `done` or `dead_letter`. A later call returns the entries that a
        cancelled call, a broken connection or an earlier process of this engine's name has left behind. A call stops at
        about 8 MiB of data. It returns `[]` while Redis does not answer. Not for concurrent use by one engine.

        Raises:
            BusError: Redis refuses.
        """
        intake = self._intakes.get((model, engine))
        if intake is None:
            names = [*queue_names(self._keys, model), self._keys.queue(model, f"engine:{engine}")]
            names.append(self._keys.queue(model, "holders"))
            guard = self._connections.guard
            intake = self._intakes[model, engine] = Intake(self._connections.link(), names, engine, guard)
        return await intake.take(count, block_ms, count if room is None else room)

    async def done(self, model: str, trace: str, holder: str = "", attempt: int = 0) -> None:
        """Settle a taken entry, which then leaves the queue. Idempotent.

        With `holder`, only an entry that this engine holds is settled; with `attempt`, only one of this attempt.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        await self._connections.command(*settle_command(self._keys, model, trace, holder, attempt))
        self.note_settled(model, trace)

    async def holders(self, model: str) -> list[str]:
        """The engines that have taken entries. Some of them may have settled all of theirs.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        key = self._keys.queue(model, "holders")
        found = await self._connections.command("SMEMBERS", key)
        return [name for one in found if (name := self._connections.guard.read(bytes.decode, one, key=key, entry=one))]

    async def acquire_role(self, model: str, role: str, who: str) -> bool:
        """Acquire a role that one process at a time has, or renew it. Returns whether `who` has it now.

        The process in the role does work for the whole queue (`tracewire_bus.recovery`). It loses the role if it does
        not call this again within `ROLE_S` seconds.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        key = self._keys.queue(model, f"caretaker:{role}")
        return bool(await self._connections.command(*_ACQUIRE_ROLE((key,), who, round(ROLE_S * 1000))))

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
        """Put the entries that `holder` has taken back at their old places in the queue.

        Args:
            model: the queue's model.
            holder: the engine that has the entries.
            why: the reason, for readers and dead letters.
            lost: whether the engine was lost. Then each entry loses one of its tries, and an entry without any is given
                up.
            trace: put back this trace's entry only.
            attempt: with `trace`, put it back only if `holder` has it under this attempt.
            which: a list that gains each trace that waits again, with the attempt that is over.

        Returns:
            The number of entries that wait again.

        Raises:
            BusUnavailable: Redis does not answer; some or all may have been put back.
        """
        names = [*queue_names(self._keys, model), self._keys.queue(model, "holders")]
        back = 0
        while True:
            parts = to_bytes(holder), why[:1000], "1" if lost else "", _GIVEN_UP, to_bytes(trace)
            call = _PUT_BACK(names, *parts, _PUT_BACK_AT_ONCE, attempt)
            some, more = await self._connections.command(*call)
            back += len(some)
            if which is not None:
                which += [(to_text(one), int(number)) for one, number in some]
            if not more:
                return back

    async def hand_over(self, model: str, taken: Taken, holder: str, *, to: str, attempt: int) -> bool:
        """Give an entry that `holder` has taken to the engine `to`, which runs its trace as `attempt`.

        Returns False if `holder` has the entry no longer, or as another attempt.

        Raises:
            BusUnavailable: Redis does not answer; the other engine may have the entry.
        """
        names = [*queue_names(self._keys, model), self._keys.queue(model, "holders")]
        call = _HAND_OVER(names, to_bytes(taken.trace), to_bytes(holder), taken.attempt, to_bytes(to), attempt)
        given = bool(await self._connections.command(*call))
        self.note_settled(model, taken.trace)
        return given

    async def still_waiting(self, model: str, traces: Sequence[str]) -> set[str]:
        """Those of these traces whose entries wait, and that no engine has taken.

        Raises:
            BusUnavailable: Redis does not answer.
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
        """The entries that were given up and are not settled, in the order of submission. Large ones lack their data.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        call = _HELD(queue_names(self._keys, model), _GIVEN_UP, TAKE_BYTES, INLINE_BYTES)
        return self._all_taken(model, await self._connections.command(*call, unbatched=True))

    def _all_taken(self, model: str, replies: Sequence[Sequence[Any]]) -> list[Taken]:
        key = self._keys.queue(model, "entries")
        return [taken_entry(self._connections.guard, key, one) for one in replies]

    def redeliver(self, model: str, engine: str, trace: str) -> None:
        """Have a later `take` return an entry that `engine` has taken again, under the same attempt."""
        intake = self._intakes.get((model, engine))
        if intake is not None:
            intake.redeliver(trace)

    def holds(self, model: str, engine: str, trace: str) -> bool:
        """Whether `engine` has taken an entry that was neither settled nor put back since, as this process knows."""
        intake = self._intakes.get((model, engine))
        return intake is not None and trace in intake.claimed

    def note_settled(self, model: str, trace: str) -> None:
        """Note that an entry was settled by `settle_command`, or belongs to another engine by now."""
        for (of, _), intake in self._intakes.items():
            if of == model:
                intake.claimed.discard(trace)

    async def dead_letter(self, model: str, taken: Taken, reason: str, holder: str = "") -> None:
        """Move an entry to the dead letters, with the reason.

        The call may be repeated after a crash or a lost reply: an entry becomes one dead letter. With `holder`, an
        entry that this engine does not hold any more stays, and becomes none.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        if holder:
            taken_by = await self._connections.command("HGET", self._keys.queue(model, "taken"), to_bytes(taken.trace))
            if taken_by is None or to_text(taken_by) != holder:
                self.note_settled(model, taken.trace)
                return
        data = None
        if b"d" not in taken.fields:
            name = self._keys.queue(model, "data")
            data = await self._connections.command("HGET", name, to_bytes(taken.trace), unbatched=True) or b""
        await self._dead_letters.add(model, taken, reason, data)
        await self.done(model, taken.trace, holder, taken.attempt if holder else 0)

    async def withdraw(self, model: str, trace: str) -> bool:
        """Remove a waiting entry. Returns False if an engine has taken it, or if it was never put.

        Idempotent: a second call for a withdrawn trace also returns True.

        Raises:
            BusUnavailable: Redis does not answer; the entry may have been removed.
        """
        submitted = to_bytes(self._keys.submitted(model, trace))
        call = _WITHDRAW([*queue_names(self._keys, model), submitted], to_bytes(trace), REMEMBER_S)
        return bool(await self._connections.command(*call))

    async def leases(self, model: str) -> list[str]:
        """The leases of all entries that wait, or that were withdrawn with their lease and are not settled.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        waiting, holders = await self._connections.commands(
            ("SMEMBERS", self._keys.queue(model, "leases")), ("HVALS", self._keys.queue(model, "taken"))
        )
        mark = _holder("")
        withdrawn = {holder.removeprefix(mark) for holder in holders if holder.startswith(mark)}
        return [to_text(lease) for lease in {*waiting, *withdrawn}]

    async def withdrawn(self, model: str) -> list[str]:
        """The leases with which entries were withdrawn that are not settled.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        mark = _holder("")
        holders = await self._connections.command("HVALS", self._keys.queue(model, "taken"))
        return [to_text(lease) for lease in {one.removeprefix(mark) for one in holders if one.startswith(mark)}]

    async def reinstate_lease(self, model: str, lease: str) -> int:
        """Have the entries that were withdrawn with a lease wait again. Returns how many there were.

        Raises:
            BusUnavailable: Redis does not answer; some may wait again.
        """
        return await self.put_back(model, to_text(_holder(lease)), "its submitter is back", lost=False)

    async def withdraw_lease(self, model: str, lease: str) -> list[Taken]:
        """Withdraw all entries that wait under a lease. Returns them in the order of submission.

        No engine can take withdrawn entries. Each call returns them again until they are settled (`done`), so that no
        lost reply loses an entry. Entries of more than 64 KiB, and those beyond 8 MiB in all, lack their data `d`.

        Raises:
            BusUnavailable: Redis does not answer; the entries may have been withdrawn.
        """
        call = _WITHDRAW_LEASE(
            queue_names(self._keys, model), to_bytes(lease), _holder(lease), TAKE_BYTES, INLINE_BYTES
        )
        return self._all_taken(model, await self._connections.command(*call, unbatched=True))

    async def waiting(self, model: str) -> int:
        """The number of waiting entries.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        key = self._keys.queue(model, "state")
        found = await self._connections.command("HGET", key, "waiting")
        return self._connections.guard.read(integer, found or 0, -GREATEST, key=key, entry="waiting") or 0

    async def oldest_s(self, model: str) -> float:
        """For how many seconds the longest-waiting of the clients' next entries has waited; 0 if no entry waits.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        entries, own = self._keys.queue(model, "entries"), self._keys.queue(model, "client:").encode()
        clients = await self._connections.command("ZRANGE", self._keys.queue(model, "turns"), 0, -1)
        first = (
            await self._connections.commands(*(("ZRANGE", own + client, 0, 0) for client in clients)) if clients else []
        )
        traces = [members[0][_NUMBER_DIGITS:] for members in first if members]
        if not traces:
            return 0.0
        found, (seconds, micros) = await self._connections.commands(("HMGET", entries, *traces), ("TIME",))
        now = int(seconds) + int(micros) / 1e6
        queued = (self._connections.guard.read(_queued_at, entry, key=entries) for entry in found if entry is not None)
        return max((now - at for at in queued if at is not None), default=0.0)

    async def clients(self, model: str) -> dict[str, int]:
        """The number of waiting entries of each client, in the order of the clients' turns.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        clients = await self._connections.command("ZRANGE", self._keys.queue(model, "turns"), 0, -1)
        own = self._keys.queue(model, "client:").encode()
        counts = await self._connections.commands(*(("ZCARD", own + client) for client in clients)) if clients else []
        return {to_text(client): count for client, count in zip(clients, counts, strict=True) if count}


def _queued_at(entry: bytes) -> float:
    """When an entry was queued, in seconds since the epoch, of its packed form (`lua/shared/queue.lua`)."""
    return integer(_decode_entry(entry)[1]) / 1e6


def _holder(lease: str) -> bytes:
    """The holder of entries that were withdrawn under a lease. No engine has such a name."""
    return b"\0" + to_bytes(lease)
