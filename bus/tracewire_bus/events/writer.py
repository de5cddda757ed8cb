"""Appending events to traces' streams.

Appends of many tasks share round trips: one flush is under way at a time, and the next takes all that was queued
meanwhile. An idle writer sends at once; a busy one sends fewer, larger pipelines.

The id that an event carries is its fence. Redis takes only an id greater than the stream's last, so a stale attempt, a
repeat, and anything after the final are refused by Redis itself. The writer sends a flush again when the connection
broke in its middle; an event that Redis had taken the first time is then refused too, and told by its bytes.

A server that comes back may have less than it had acknowledged: it was killed before its log was on the disk, or is a
replica that lagged. The writer keeps what was acknowledged of late, and on every new connection, before anything else,
appends again what is missing, under the same ids. What is lost of a stream is always its end. A stream that has
anything else, or lacks more than was kept, is *fenced* for the attempt.

A Redis without memory refuses outputs. A refused one holds back what follows it in its own trace and nothing else. It
is tried again for as long as the writer is patient; then all that waits of its trace fails with `BusFull`. First events
and finals always fit.

A node of a cluster refuses what takes several keys of a slot that is being moved: a trace's first event and its final,
above all. That holds back its own trace likewise, but until the move is over, however long that takes. What goes with
an event to another slot waits for that one's move, and the event's append with it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

import anyio
import msgspec

from tracewire_bus.store.keys import Keys
from tracewire_bus.store.submission_queue import settle_command
from tracewire_bus.transport.backoff import Backoff
from tracewire_bus.transport.errors import BusFull, as_bus_error, is_full, is_transient
from tracewire_bus.transport.loops import Loop, Timer, running_loop
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.tasks import OwnedTask, Signal
from tracewire_bus.wire.codec import schema_text
from tracewire_bus.wire.ids import event_id, parse_id

from .appends import (
    ENTRY_BYTES,
    UNFINISHED_S,
    Append,
    EntryTooLarge,
    Fenced,
    Stream,
    append_commands,
    effects_command,
    field_of,
    is_away,
    is_fence,
    is_moving,
)
from .batches import Batch, StuckStreams
from .deferred import DeferredCommands, MoveWarning
from .restore import Restorer

__all__ = ["Writer"]

logger = logging.getLogger("tracewire")

#: The next flush begins no sooner than this after the last one began, in seconds: for each entry that it carried, and
#: at most. It leaves a busy publisher's loop half free, and what a trace puts out meanwhile shares an entry.
_PACE_S, _PAUSE_S = 100e-6, 8e-3
#: A pause that is not worth the timer.
_SHORT_S = 1e-3


class Writer:
    """Appends events for as long as its context is open: `async with bus.writer() as writer`.

    On a new connection the commands of `restorer.claims` are sent first, and `before` is awaited: they write again what
    a server may have lost besides events. `patience_s` is how long an event waits for memory, in seconds.
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
        #: What goes with events that Redis has, and waits for its slot to be moved.
        self._deferred = DeferredCommands(self._end)
        self._move_warning = MoveWarning()
        #: Appends again what a server that came back lacks.
        self.restorer = Restorer(connections, self._deferred, before)
        #: Whether there are several servers, each with some of the streams.
        self._several = connections.slot("") is not None
        self._timer: Timer | None = None
        self.patience_s = patience_s
        #: Bytes of all events that Redis has not acknowledged yet.
        self.backlog = 0
        self._wanted = Signal()
        self._idle = Signal()
        self._flushing = False
        self._loop: Loop
        self._task: OwnedTask | None = None

    async def __aenter__(self) -> Self:
        self._loop = running_loop()
        self._task = OwnedTask(self._run, "that writes events")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Send what is queued, for at most 2 seconds, and end. Appends that wait still get `ClosedResourceError`."""
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
            for item in [
                *self._stuck.clear(),
                *self._deferred.clear(),
                *self._queue,
            ]:
                self._end(item, anyio.ClosedResourceError())
            self._queue.clear()
            await self.restorer.link.drop()

    def submit(
        self,
        trace: str,
        attempt: int,
        seq: int,
        data: bytes,
        final: bool = False,
        *,
        settles: tuple[str, str, str, int] | tuple[str, str, str] | None = None,
        live_version: int | None = None,
        lifecycle: Sequence[Any] | None = None,
    ) -> Coroutine[Any, Any, str]:
        """Queue an encoded event at once. Await what it returns for the event's id, when Redis has it.

        Events are numbered and queued in one order: call it for the next event of a trace before awaiting anything
        else. While Redis is away the event waits. A cancelled append may still be carried out, so its number is spent.

        `final` gives the event the greatest id of all and lets the trace expire, its blobs with it. `settles` (a model,
        the trace of a queue entry, its holder, its attempt) settles that entry in the same round trip, also where the
        event is refused, unless Redis has lost what was before it. `live_version` says that the event reports all
        changes of live parameters up to that version. `lifecycle` is what `lifecycle_fields` makes.

        Raises:
            Fenced: the stream holds this event or a later one, or lacks one before it that cannot be appended again.
            BusFull: Redis had no memory for it for too long, nor for what was queued behind it. Their numbers are free
                again. All that follows fails likewise until `resume` is called.
            EntryTooLarge: `data` is larger than an entry may be.
            BusError: Redis refused it.
            anyio.ClosedResourceError: the writer is closed, or was before Redis had it.
        """
        if self._task is None:
            raise anyio.ClosedResourceError
        id_ = event_id(attempt, seq, final=final)
        if len(data) > ENTRY_BYTES:
            raise EntryTooLarge(f"event {attempt}-{seq} takes {len(data)} bytes, an entry holds {ENTRY_BYTES}")
        keys = self._keys
        key = keys.events(trace)
        with_effects = None
        if final or seq == 0 or live_version is not None or lifecycle is not None:
            keep_s = self._retention_s if final else UNFINISHED_S if seq == 0 else ""
            with_effects = effects_command(
                keys, trace, id_, attempt, final=final, keep_s=keep_s, version=live_version, lifecycle=lifecycle or ()
            )
        settle = None if settles is None else settle_command(keys, *settles)
        stream = self.restorer.stream(key, keys.record(trace), keys.firehose(keys.tag(trace)))
        if attempt > stream.attempt:
            stream.attempt, stream.patient = attempt, True
        stream.over = False
        published = msgspec.msgpack.encode([str(one) for one in lifecycle]) if lifecycle else b""
        outcome = self._loop.create_future()
        item = Append(stream, key, id_, attempt, data, final, with_effects, published, settle, outcome)
        stream.under_way += 1
        self.backlog += item.size
        if stream.given_up:
            self._end(item, BusFull(f"Redis had no memory left for what was before event {id_}"))
            return self._outcome(item, None)
        self._queue.append(item)
        self._wanted.notify()
        return self._outcome(item, settles)

    async def _outcome(self, item: Append, settles: tuple[Any, ...] | None) -> str:
        error = await item.outcome
        if error is not None:
            raise error
        if settles is not None:
            self._settled(*settles[:2])
        return item.id

    async def append(self, trace: str, attempt: int, seq: int, data: bytes, final: bool = False, **more: Any) -> str:
        """`submit`, and wait until Redis has it."""
        return await self.submit(trace, attempt, seq, data, final, **more)

    def resume(self, trace: str, attempt: int) -> int:
        """Go on after `BusFull`.

        Returns the number of the last event of this attempt that Redis has acknowledged, -1 if there is none.
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
        """This trace is to end: what Redis has no memory for now need not wait for it."""
        stream = self.restorer.streams.get(self._keys.events(trace))
        if stream is not None:
            stream.patient = False

    def forget(self, trace: str) -> None:
        """Nothing more will be appended to this trace for now."""
        key = self._keys.events(trace)
        stream = self.restorer.streams.get(key)
        if stream is not None:
            stream.over = True
            self.restorer.drop(key, stream)

    # --- its task -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            if self._loop.time() >= self.restorer.look_at > 0.0:
                await self.restorer.look(self._is_pending)
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
                logger.exception("the writer failed on a flush of %d entries", len(batch))
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
        """Wake the task when something is to be tried again, or looked at."""
        due = [self.restorer.look_at] if self.restorer.look_at > 0.0 else []
        if self._stuck:
            due.append(self._stuck.retry_at)
        if self._deferred:
            due.append(self._deferred.retry_at)
        at = min(due, default=0.0)
        if at <= 0.0:
            return
        if self._timer is not None:
            if not self._timer.cancelled() and self._loop.time() < self._timer.when() <= at:
                # It rings soon enough.
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._wanted.notify)

    def _is_pending(self) -> bool:
        return bool(self._queue or self._stuck or self._deferred)

    def _next_batch(self) -> list[Append]:
        batch = Batch()
        probed = self._stuck.retry(batch, self._loop.time())
        self._stuck.take(self._queue, batch)
        self._stuck.probe(batch, probed)
        return batch.items

    def _end(self, item: Append, error: Exception | None = None) -> None:
        if item.ended:
            return
        item.ended = True
        self.backlog -= item.size
        item.stream.under_way -= 1
        if item.final:
            item.stream.over = True
        self.restorer.drop(item.key, item.stream)
        if not item.outcome.done():
            item.outcome.set_result(error)

    async def _flush(self, batch: list[Append]) -> None:
        """Bring a batch into Redis, whatever it takes, and end every append in it that does not come to wait apart."""
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
                if self.restorer.link.opened != self.restorer.whole:
                    # A server that is new to us has some of their streams: first what it lacks.
                    continue
                replies = await self.restorer.link.ask(*commands, stay=True, wait=False) if commands else []
            except Exception as error:
                if not is_transient(error):
                    raise as_bus_error(error) from error
                # Some of it may be there.
                for item in batch:
                    item.repeated = True
                problem = error
            else:
                opened = self.restorer.link.opened
                away = [reply for reply in replies if is_away(reply)]
                batch = await self._take(batch, places, replies, waiting, through)
                if self.restorer.link.opened != opened:
                    # Not all of it was known when that server was brought up to date.
                    self.restorer.whole = -1
                if not batch:
                    break
                count, problem = len(batch), away[0]
                # Perhaps it is no primary any more.
                await self.restorer.link.drop()
            pause = backoff.next()
            logger.log(backoff.level, "%d entries wait for Redis: %s", count, problem)
            await anyio.sleep(pause)
        # Of a cluster, some nodes only.
        self.restorer.prune(looked=not self._several)
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
        """See what came of a batch. Returns what a server that was not itself left of it, to be sent again."""
        again: list[Append] = []
        held: set[str] = set()
        for item, place in zip(batch, places, strict=True):
            outcome = replies[place]
            if item.settle is not None and not item.settles_late:
                # What could not be done behind an event is done once more.
                behind = replies[place + 1]
                item.settles_late = isinstance(behind, Exception) and is_transient(behind)
            if item.key in held or (is_away(outcome) and item.key not in waiting):
                # What is behind it in its stream must not go before it.
                held.add(item.key)
                item.repeated = True
                again.append(item)
            elif not isinstance(outcome, Exception):
                self.restorer.keep(item)
                await self._conclude(item)
                through.add(item.key)
            elif item.key in waiting:
                waiting[item.key].append(item)
            elif is_full(outcome) or is_moving(outcome):
                item.refused = is_full(outcome)
                waiting[item.key] = [item]
            elif not is_fence(outcome):
                self._end(item, as_bus_error(outcome))
            elif item.repeated and await self._holds(item):
                # With all that goes with it, but for its queue entry.
                item.settles_late = True
                self.restorer.keep(item)
                await self._conclude(item)
                through.add(item.key)
            else:
                await self._conclude(item, Fenced(f"event {item.id} of {item.key} is not after the last one there"))
        return again

    def _unfenced(self, batch: list[Append]) -> list[Append]:
        """Those whose streams are as this writer left them."""
        lost = [item for item in batch if item.attempt <= item.stream.lost]
        for item in lost:
            self._end(item, Fenced(f"Redis has lost what was before event {item.id} of {item.key}, or has another's"))
        return [item for item in batch if item.attempt > item.stream.lost] if lost else batch

    async def _conclude(self, item: Append, error: Exception | None = None) -> None:
        """End an append, once the queue entry of its event is settled where that was not done with it."""
        if item.settle is not None and item.settles_late:
            (reply,) = await self.restorer.execute_until_answered(item.settle, moving=True)
            if is_moving(reply):
                return self._deferred.add(item.settle, item, error)
        return self._end(item, error)

    async def _holds(self, item: Append) -> bool:
        """Whether the stream holds exactly this event."""
        (found,) = await self.restorer.execute_until_answered(("XRANGE", item.key, item.id, item.id))
        return isinstance(found, list) and bool(found) and field_of(found[0][1], b"d") == item.data

    async def _wait_apart(self, waiting: dict[str, list[Append]], through: set[str]) -> None:
        """Put what was refused back, in order, and give up what has waited for memory for too long."""
        for key, stream in self._stuck.put_back(waiting, through, self._loop.time()):
            await self._give_up(key, stream)
        self._warn_of_moves()

    def _warn_of_moves(self) -> None:
        self._move_warning.note(len(self._deferred) + self._stuck.moving)

    async def _give_up(self, key: str, stream: Stream) -> None:
        """Fail what waits of a stream, in which nothing may be missing."""
        items = [*stream.stuck, *(item for item in self._queue if item.key == key)]
        stream.stuck.clear()
        stream.given_up = True
        self._queue = deque(item for item in self._queue if item.key != key)
        logger.warning("Redis had no memory for %d events of %s for %g s", len(items), key, self.patience_s)
        error: BusFull | None = None
        for item in items:
            if error is None and item.repeated and await self._holds(item):
                item.settles_late = True
                self.restorer.keep(item)
                await self._conclude(item)
                continue
            error = BusFull(f"Redis had no memory left for event {item.id} for {self.patience_s:g} s")
            self._end(item, error)
