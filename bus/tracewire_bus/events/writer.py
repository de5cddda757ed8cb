"""The writer: appends events to the streams of traces.

**Batches.** Appends of many tasks share round trips. One flush is under way at a time, and the next one takes all
events that were queued meanwhile. An idle writer sends at once; a busy one sends fewer, larger pipelines.

**Fencing.** Redis takes only an id greater than the stream's last. So Redis itself refuses the events of a stale
attempt, repeats, and events after the final. After a broken connection the writer sends the flush again. Redis refuses
the events that it took the first time; the writer recognises these by their bytes.

**Lost acknowledgements.** A server that restarted or failed over may have lost events that it had acknowledged. The
writer keeps recent events, and on each new connection first appends the missing ones again, under the same ids. Redis
always loses the end of a stream. A stream that has other events instead, or lacks more than the writer kept, is
*fenced* for the attempt.

**Full memory.** A Redis without memory refuses outputs. A refused event holds back the later events of its trace only.
The writer retries for `patience_s` seconds; then all waiting events of the trace fail with `BusFull`. Redis always
takes first events and finals.

**Moving slots.** While a cluster moves a slot, its nodes refuse commands on several keys of that slot, above all a
trace's first event and its final. The refused event holds back its trace until the move is over. A command that goes
with an event to another slot waits for the move of that slot, and the append ends after it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

import anyio
import msgspec

from tracewire_bus.domain.identity import Signer
from tracewire_bus.store.keys import Keys
from tracewire_bus.store.submission_queue import settle_command
from tracewire_bus.transport.backoff import Backoff
from tracewire_bus.transport.errors import BusFull, as_bus_error, is_full, is_transient
from tracewire_bus.transport.loops import Loop, Timer, running_loop
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.tasks import OwnedTask, Signal
from tracewire_bus.wire.codec import schema_text
from tracewire_bus.wire.ids import event_id, parse_id
from tracewire_bus.wire.pieces import Pieces

from .appends import (
    ENTRY_BYTES,
    OVERHEAD,
    UNFINISHED_S,
    Append,
    EntryTooLarge,
    Fenced,
    Stream,
    append_commands,
    effects_command,
    is_away,
    is_fence,
    is_moving,
    sign_finals,
)
from .batches import Batch, StuckStreams
from .deferred import DeferredCommands, EndedAppends, MoveWarning
from .restore import Restorer
from .riders import Riders, execute_with

__all__ = ["Writer"]

logger = logging.getLogger("tracewire")

#: Least time between the beginnings of two flushes, in seconds: for each entry of the first one, and at most. The pause
#: leaves a busy adapter's event loop half free, and outputs of a trace in the pause share an entry.
_PACE_S, _PAUSE_S = 100e-6, 8e-3
#: Shorter pauses are left out, in seconds.
_SHORT_S = 1e-3


class Writer:
    """Appends events while its context is open: `async with bus.writer() as writer`.

    `patience_s` is how long an event waits while Redis has no memory, in seconds. `settled` is called with model and
    trace after an event that settled a queue entry. On a new connection, the writer first executes the commands of
    `restorer.claims` and awaits `before`, which write again other data that a server may have lost.
    """

    def __init__(
        self,
        connections: Connections,
        keys: Keys,
        retention_s: float,
        settled: Callable[[str, str], None],
        *,
        patience_s: float = 60.0,
        before: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._settled = settled
        self._keys = keys
        self._retention_s = max(1, round(retention_s))
        self._schema = schema_text()
        self._queue: deque[Append] = deque()
        self._stuck = StuckStreams(lambda: self.patience_s)
        #: Commands that belong to appended events and wait until a cluster has moved their slots.
        self._deferred = DeferredCommands(self._end)
        self._move_warning = MoveWarning()
        #: Owns the connection, and appends lost events again.
        self.restorer = Restorer(connections, self._deferred, before)
        #: Whether the streams are on several servers, as on a cluster.
        self._several = connections.slot("") is not None
        self._timer: Timer | None = None
        #: When it rings. uvloop's timers do not know it if they are due within half a millisecond.
        self._rings_at = 0.0
        self.patience_s = patience_s
        #: Signs finals, if it is set: one signature for those of one round trip.
        self.signer: Signer | None = None
        #: Have commands that go with flushes, if it is set.
        self.riders: Riders | None = None
        #: Size of all events that Redis has not acknowledged, in bytes.
        self.backlog = 0
        self._wanted = Signal()
        self._idle = Signal()
        self._flushing = False
        self._loop: Loop
        self._task: OwnedTask | None = None

    async def __aenter__(self) -> Self:
        self._loop, self._task = running_loop(), OwnedTask(self._run, "that writes events")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Send queued events for at most 2 seconds, and end. Waiting appends then raise `ClosedResourceError`."""
        task, self._task = self._task, None
        if task is None:
            return
        with anyio.move_on_after(2, shield=True):
            while self._queue or self._stuck or self._deferred or self._flushing:
                await self._idle.wait()
        try:
            await task.aclose()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for item in (*self._stuck.clear(), *self._deferred.clear(), *self._queue):
                self._end(item, anyio.ClosedResourceError())
            self._queue.clear()
            await self.restorer.link.drop()

    def submit(
        self,
        trace: str,
        attempt: int,
        seq: int,
        data: bytes | Pieces,
        final: bool = False,
        *,
        settles: tuple[str, str, str, int] | tuple[str, str, str] | None = None,
        live_version: int | None = None,
        lifecycle: Sequence[Any] | None = None,
    ) -> Coroutine[Any, Any, str]:
        """Queue an encoded event now. Awaiting the result waits until Redis has the event, and returns the event's id.

        The order of calls is the order of events on the stream, so number and submit an event without awaiting in
        between. The event waits while Redis does not answer. A cancelled append may still take effect, so its number
        must not be used again.

        Args:
            trace: the trace's id.
            attempt, seq: the event's number.
            data: the encoded event.
            final: gives the event the greatest id of all, and lets the trace and its blobs expire.
            settles: model, trace, holder and attempt of a queue entry to settle in the same round trip. The entry is
                also settled if Redis refuses the event, unless Redis has lost earlier events of the stream.
            live_version: the event reports all changes of live parameters up to this version.
            lifecycle: fields of a lifecycle entry to publish with the event (`lifecycle_fields`).

        Raises:
            Fenced: the stream has this event or a later one, or has lost earlier events that cannot be appended again.
            BusFull: Redis had no memory for too long, for this event and those behind it. Their numbers are free again.
                Later events of the trace fail likewise until the caller calls `resume`.
            EntryTooLarge: `data` has more than 256 MiB.
            BusError: Redis refuses. The number of a final is free again.
            anyio.ClosedResourceError: the writer is closed, or was closed before Redis had the event.
        """
        if self._task is None:
            raise anyio.ClosedResourceError
        id_ = event_id(attempt, seq, final=final)
        if len(data) > ENTRY_BYTES:
            raise EntryTooLarge(f"event {attempt}-{seq} takes {len(data)} bytes, an entry holds {ENTRY_BYTES}")
        key = self._keys.events(trace)
        with_effects = self._effects(trace, id_, attempt, seq, final, live_version, lifecycle)
        settle = None if settles is None else settle_command(self._keys, *settles)
        stream = self.restorer.stream(key, self._keys, trace)
        if attempt > stream.attempt:
            stream.attempt, stream.patient = attempt, True
        stream.over = False
        published = msgspec.msgpack.encode([str(one) for one in lifecycle]) if lifecycle else b""
        outcome, size = self._loop.create_future(), len(data) + OVERHEAD
        item = Append(stream, key, id_, attempt, data, final, with_effects, published, settle, outcome, size)
        stream.under_way += 1
        self.backlog += item.size
        if stream.given_up:
            self._end(item, BusFull(f"Redis had no memory left for the events before {id_}"))
            return self._outcome(item, None)
        self._queue.append(item)
        self._wanted.notify()
        return self._outcome(item, settles)

    def _effects(
        self,
        trace: str,
        id_: str,
        attempt: int,
        seq: int,
        final: bool,
        version: int | None,
        lifecycle: Sequence[Any] | None,
    ) -> Callable[[str, bytes | Pieces, str], tuple[Any, ...]] | None:
        if not final and seq != 0 and version is None and lifecycle is None:
            return None
        keep_s = self._retention_s if final else UNFINISHED_S if seq == 0 else ""
        return effects_command(
            self._keys, trace, id_, attempt, final=final, keep_s=keep_s, version=version, lifecycle=lifecycle or ()
        )

    async def _outcome(self, item: Append, settles: tuple[Any, ...] | None) -> str:
        error = await item.outcome
        if error is not None:
            raise error
        if settles is not None:
            self._settled(*settles[:2])
        return item.id

    async def append(
        self, trace: str, attempt: int, seq: int, data: bytes | Pieces, final: bool = False, **more: Any
    ) -> str:
        """Call `submit`, and wait until Redis has the event. Returns the event's id."""
        return await self.submit(trace, attempt, seq, data, final, **more)

    def resume(self, trace: str, attempt: int) -> int:
        """Accept events of a trace again after `BusFull`, or after Redis has refused its final.

        Returns the sequence number of the last event of this attempt that Redis has acknowledged, -1 if there is none.
        """
        stream = self.restorer.streams.get(self._keys.events(trace))
        if stream is not None:
            stream.given_up = False
        last = "" if stream is None else stream.kept[-1].id if stream.kept else stream.base
        if not last:
            return -1
        found, seq = parse_id(last)
        return seq if found == attempt else -1

    def hurry(self, trace: str) -> None:
        """Let events of a trace that is about to end fail with `BusFull` at once instead of waiting for memory."""
        if (stream := self.restorer.streams.get(self._keys.events(trace))) is not None:
            stream.patient = False

    def forget(self, trace: str) -> None:
        """Release the state of a trace for which no more events come."""
        key = self._keys.events(trace)
        stream = self.restorer.streams.get(key)
        if stream is not None:
            stream.over = True
            self.restorer.drop(key, stream)

    # --- its task -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            if self._loop.time() >= self.restorer.check_at > 0.0:
                await self.restorer.check(self._is_pending)
            if self._deferred and self._loop.time() >= self._deferred.retry_at:
                await self._deferred.retry(self.restorer.execute_until_answered)
                self._warn_of_moves()
            batch = self._next_batch()
            if not batch:
                if not self._stuck and not self._deferred:
                    self._idle.notify()
                self._wake_later()
                await self._wanted.wait()
                continue
            self._flushing = True
            free = self._loop.time() + min(_PACE_S * len(batch), _PAUSE_S)
            try:
                await self._flush(batch)
                if (pause := free - self._loop.time()) > _SHORT_S and self._task is not None:
                    await anyio.sleep(pause)
            except Exception as error:
                logger.exception("the writer failed to flush %d entries", len(batch))
                for item in batch:
                    self._end(item, error)
            except BaseException:
                # Cancelled: the writer closes.
                for item in batch:
                    self._end(item, anyio.ClosedResourceError())
                raise
            finally:
                self._flushing = False

    def _wake_later(self) -> None:
        """Set the timer that wakes the task for the next retry or check."""
        due = [self.restorer.check_at] if self.restorer.check_at > 0.0 else []
        if self._stuck:
            due.append(self._stuck.retry_at)
        if self._deferred:
            due.append(self._deferred.retry_at)
        at = min(due, default=0.0)
        # The timer that is set may ring soon enough. One that is due now may have rung: uvloop rounds to milliseconds.
        if at <= 0.0 or self._loop.time() + _SHORT_S < self._rings_at <= at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._rings_at = self._loop.call_at(at, self._wanted.notify), at

    def _is_pending(self) -> bool:
        return bool(self._queue or self._stuck or self._deferred)

    def _next_batch(self) -> list[Append]:
        batch = Batch()
        probed = self._stuck.retry(batch, self._loop.time())
        self._stuck.take(self._queue, batch)
        self._stuck.probe(batch, probed)
        sign_finals(batch.items, self.signer, self._keys.prefix)
        return batch.items

    def _end(self, item: Append, error: Exception | None = None) -> None:
        if item.ended:
            return
        item.ended = True
        self.backlog -= item.size
        item.stream.under_way -= 1
        if item.final and (error is None or isinstance(error, Fenced)):
            # Behind a final that Redis has refused, the caller may send another one.
            item.stream.over = True
        self.restorer.drop(item.key, item.stream)
        if not item.outcome.done():
            item.outcome.set_result(error)

    async def _flush(self, batch: list[Append]) -> None:
        """Send a batch until Redis has answered each append. Ends the appends, but for those that wait apart.

        Raises:
            BusError: Redis refuses the whole batch.
        """
        backoff = Backoff()
        waiting: dict[str, list[Append]] = {}
        through: set[str] = set()
        while batch:
            count = len(batch)
            try:
                await self.restorer.connect()
                batch = self._unfenced(batch)
                commands, places = append_commands(batch, self._schema)
                await self.restorer.link.prepare(*commands)
                if self.restorer.link.opened != self.restorer.restored:
                    # A new connection has some of the streams: `connect` first appends the events that it lacks.
                    continue
                # On a cluster they could be for a server that does not answer.
                riders = None if self._several else self.riders
                replies = await execute_with(riders, self.restorer.link, commands)
            except Exception as error:
                if not is_transient(error):
                    raise as_bus_error(error) from error
                # Redis may have taken some of them.
                for item in batch:
                    item.repeated = True
                problem = error
            else:
                opened = self.restorer.link.opened
                away = [reply for reply in replies if is_away(reply)]
                batch = await self._take(batch, places, replies, waiting, through)
                if self.restorer.link.opened != opened:
                    # The link reconnected meanwhile, and restored streams without the events of this batch.
                    self.restorer.restored = -1
                if not batch:
                    break
                count, problem = len(batch), away[0]
                # This server may no longer be the primary.
                await self.restorer.link.drop()
            pause = backoff.next()
            logger.log(backoff.level, "%d entries wait for Redis: %s", count, problem)
            await anyio.sleep(pause)
        # On a cluster, only some nodes have answered.
        self.restorer.prune(checked=not self._several)
        if waiting or self._stuck:
            await self._wait_apart(waiting, through)

    async def _take(
        self,
        batch: list[Append],
        places: list[int],
        replies: list[Any],
        waiting: dict[str, list[Append]],
        through: set[str],
    ) -> list[Append]:
        """Handle the replies to a batch. Returns the appends that a server was not ready for, to be sent again."""
        again: list[Append] = []
        held: set[str] = set()
        ended = EndedAppends(self._end, self._deferred)
        for item, place in zip(batch, places, strict=True):
            outcome = replies[place]
            if item.settle is not None and not item.settles_late:
                # A server that was not ready did not settle the entry, so it is settled after the event.
                behind = replies[place + 1]
                item.settles_late = isinstance(behind, Exception) and is_transient(behind)
            if (held and item.key in held) or (is_away(outcome) and item.key not in waiting):
                # Later events of the stream must stay behind it.
                held.add(item.key)
                item.repeated = True
                again.append(item)
            elif not isinstance(outcome, Exception):
                self.restorer.keep(item, self._loop.time())
                ended.add(item)
                through.add(item.key)
            elif item.key in waiting:
                waiting[item.key].append(item)
            elif is_full(outcome) or is_moving(outcome):
                item.refused = is_full(outcome)
                waiting[item.key] = [item]
            elif not is_fence(outcome):
                self._end(item, as_bus_error(outcome))
            elif item.repeated and await self.restorer.holds(item):
                # Redis took it the first time, with its effects, but perhaps without settling its queue entry.
                item.settles_late = True
                self.restorer.keep(item, self._loop.time())
                ended.add(item)
                through.add(item.key)
            else:
                fenced = Fenced(f"event {item.id} of {item.key} does not follow the stream's last event")
                ended.add(item, fenced)
        await ended.settle(self.restorer.execute_until_answered)
        return again

    def _unfenced(self, batch: list[Append]) -> list[Append]:
        """The appends of a batch whose streams are not fenced; ends the others with `Fenced`."""
        lost = [item for item in batch if item.attempt <= item.stream.lost]
        for item in lost:
            self._end(
                item, Fenced(f"Redis has lost events before {item.id} of {item.key}, or has events of another writer")
            )
        return [item for item in batch if item.attempt > item.stream.lost] if lost else batch

    async def _wait_apart(self, waiting: dict[str, list[Append]], through: set[str]) -> None:
        """Let refused appends wait, in order, and give up streams that have waited for memory for too long."""
        for key, stream in self._stuck.put_back(waiting, through, self._loop.time()):
            await self._give_up(key, stream)
        self._warn_of_moves()

    def _warn_of_moves(self) -> None:
        self._move_warning.note(len(self._deferred) + self._stuck.moving)

    async def _give_up(self, key: str, stream: Stream) -> None:
        """Fail all waiting appends of a stream, since a stream must not have holes."""
        items = [*stream.stuck, *(item for item in self._queue if item.key == key)]
        stream.stuck.clear()
        stream.given_up = True
        self._queue = deque(item for item in self._queue if item.key != key)
        logger.warning("Redis had no memory for %d events of %s for %g s", len(items), key, self.patience_s)
        ended = EndedAppends(self._end, self._deferred)
        error: BusFull | None = None
        for item in items:
            if error is None and item.repeated and await self.restorer.holds(item):
                item.settles_late = True
                self.restorer.keep(item, self._loop.time())
                ended.add(item)
                continue
            error = BusFull(f"Redis had no memory left for event {item.id} for {self.patience_s:g} s")
            self._end(item, error)
        await ended.settle(self.restorer.execute_until_answered)
