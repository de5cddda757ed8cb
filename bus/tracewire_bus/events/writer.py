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

import asyncio
import itertools
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeGuard

import anyio
import msgspec

from tracewire_bus.store.keys import Keys, event_id, parse_id
from tracewire_bus.store.submission_queue import settle_command
from tracewire_bus.transport.backoff import Backoff
from tracewire_bus.transport.errors import BusError, BusFull, as_bus_error, is_full, is_transient
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.scripts import Script, with_text
from tracewire_bus.transport.tasks import OwnedTask, Signal
from tracewire_bus.wire.codec import schema_text

__all__ = ["ENTRY_BYTES", "EntryTooLarge", "Fenced", "Writer"]

logger = logging.getLogger("tracewire")

#: What one entry may hold. Redis closes the connection on a string over 512 MB, and one of 100 MB stalls it.
ENTRY_BYTES: Final = 256 * 1024 * 1024
#: How long a trace that never ends is kept, in seconds, from its first event.
UNFINISHED_S: Final = 7 * 24 * 3600
#: What was acknowledged is kept for so many seconds in which Redis answered, and so many bytes. Twice what Redis loses
#: at most with `appendfsync everysec`.
KEEP_S: float = 5.0
KEEP_BYTES: int = 64 * 1024 * 1024
#: How often a writer looks whether its server is still the same, in seconds: one that sends nothing, or has several.
LOOK_S: float = 1.0
#: How often what waits for memory, or for a slot to be moved, is tried again, in seconds.
RETRY_S: float = 0.1

_FLUSH_ENTRIES, _FLUSH_BYTES = 512, 8 * 1024 * 1024
#: So much of what waits for slots to be moved is tried at once.
_PROBES: Final = 64
#: The next flush begins no sooner than this after the last one began, in seconds: for each entry that it carried, and
#: at most. It leaves a busy publisher's loop half free, and what a trace puts out meanwhile shares an entry.
_PACE_S, _PAUSE_S = 100e-6, 8e-3
#: Larger data does not pass through Lua where nothing goes with it, which would copy it twice.
_INLINE_BYTES: Final = 64 * 1024
#: A pause that is not worth the timer.
_SHORT_S = 1e-3
#: A slot that is being moved for longer is spoken of, in seconds.
_LONG_S: Final = 5.0
#: What an event costs here besides its data, in bytes, about.
_OVERHEAD: Final = 500


_AFTER: Final = Script("append_after")
_APPEND: Final = Script("append_event")
_APPEND_FINAL: Final = Script("append_final")
_RESTORE: Final = Script("append_lost")


class Fenced(BusError):
    """The stream has this event already, or a later one: of a newer attempt, or the final. Nothing was appended.

    Also: Redis has lost more of the stream than could be appended again.
    """


class EntryTooLarge(BusError, ValueError):
    """More than one entry can hold."""


class _Append:
    """One event on its way, and what came of it."""

    __slots__ = (
        *("attempt", "data", "done", "ended", "final", "id", "key", "late", "life", "more"),
        *("outcome", "refused", "repeated", "stream"),
    )

    def __init__(
        self,
        stream: _Stream,
        key: str,
        id_: str,
        attempt: int,
        data: bytes,
        final: bool,
        more: Callable[[str, bytes, str], tuple[Any, ...]] | None,
        life: bytes,
        done: tuple[Any, ...] | None,
        outcome: asyncio.Future[Exception | None],
    ) -> None:
        self.stream = stream
        self.key = key
        self.id = id_
        self.attempt = attempt
        self.data = data
        self.final = final
        #: Makes the script's command that appends it and does what goes with it; without a schema, only the latter.
        self.more = more
        #: What the firehose is told of it, packed.
        self.life = life
        #: The command that settles its queue entry.
        self.done = done
        #: Redis may have it: an answer was lost.
        self.repeated = False
        #: Redis has no memory for it.
        self.refused = False
        #: Its queue entry is settled after it, which may have to wait.
        self.late = False
        self.ended = False
        #: What it failed with, or None, once it has ended. Cancelled with whoever waits for it.
        self.outcome = outcome

    @property
    def moving(self) -> bool:
        """Whether it waits for its slot to be moved, if it waits apart, and not only for what was before it."""
        return self.more is not None and not self.refused

    @property
    def size(self) -> int:
        """What it takes, in bytes."""
        return len(self.data) + _OVERHEAD

    @property
    def large(self) -> bool:
        """Whether it does not pass through Lua, which would copy it twice, if that can be helped."""
        return self.more is None and len(self.data) > _INLINE_BYTES


class _Behind(NamedTuple):
    """A script's command that goes with an event which Redis has; the append that ends with it, and with what error."""

    command: tuple[Any, ...]
    item: _Append | None
    error: Exception | None


class _Stream:
    """What the writer knows of a stream that it appends to."""

    __slots__ = (
        *("attempt", "base", "firehose", "given_up", "kept", "lost", "over", "patient", "record", "since"),
        *("stuck", "under_way"),
    )

    def __init__(self, record: str, firehose: str) -> None:
        #: The keys of its trace's record, and of what all are told of it.
        self.record, self.firehose = record, firehose
        #: The last event that Redis acknowledged before those kept; "" if there was none.
        self.base = ""
        #: What it acknowledged last.
        self.kept: deque[_Append] = deque()
        #: How many appends have not ended.
        self.under_way = 0
        #: What waits for memory or for the end of a slot's move, in order; and since when for memory.
        self.stuck: deque[_Append] = deque()
        self.since = 0.0
        #: Whether memory may take its time.
        self.patient = True
        #: The attempt that appends now, and up to which one it is somebody else's.
        self.attempt = self.lost = 0
        #: Nothing more comes.
        self.over = False
        #: What waited was given up, and whoever numbers the events does not know yet.
        self.given_up = False


class Writer:
    """Appends events for as long as its context is open: `async with bus.writer() as writer`.

    `claims` makes the commands that say again on a new connection what else a server may have lost, before anything is
    appended; `claimed` is called when they were carried out, and `before` is awaited then. `patience_s` is how long an
    event waits for memory, in seconds.
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
        self._connections = connections
        self._link = connections.link()
        self._keys = keys
        self._retention_s = max(1, round(retention_s))
        self._schema = schema_text()
        self._queue: deque[_Append] = deque()
        self._streams: dict[str, _Stream] = {}
        #: Streams of which something waits apart, who was tried longest ago first.
        self._stuck: dict[str, _Stream] = {}
        #: When to try these again; whether the flush under way does.
        self._retry_at = 0.0
        self._retries = False
        #: What goes with events that Redis has, and waits for its slot to be moved; and when to try that again.
        self._behind: dict[int, _Behind] = {}
        self._follow_at = 0.0
        self._numbers = itertools.count()
        #: Whether there are several servers, each with some of the streams.
        self._several = connections.slot("") is not None
        #: Since when something has waited for a slot to be moved, and when to say so.
        self._moving_since = self._say_at = 0.0
        #: What was acknowledged, in that order, and when.
        self._kept: deque[tuple[float, _Append]] = deque()
        self._kept_bytes = 0
        #: Which of the link's connections is known to have all of it; and when to look again.
        self._whole = 0
        self._look_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._before = before
        self.claims: Callable[[], Iterable[tuple[Any, ...]]] = tuple
        self.claimed: Callable[[], None] = lambda: None
        self.patience_s = patience_s
        #: Bytes of all events that Redis has not acknowledged yet.
        self.backlog = 0
        self._wanted = Signal()
        self._idle = Signal()
        self._flushing = False
        self._loop: asyncio.AbstractEventLoop
        self._task: OwnedTask | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
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
            while self._queue or self._stuck or self._behind or self._flushing:
                await self._idle.wait()
        try:
            await task.aclose()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for item in [
                *(item for stream in self._stuck.values() for item in stream.stuck),
                *(one.item for one in self._behind.values() if one.item is not None),
                *self._queue,
            ]:
                self._end(item, anyio.ClosedResourceError())
            self._queue.clear()
            self._stuck.clear()
            self._behind.clear()
            await self._link.drop()

    def queue(
        self,
        trace: str,
        attempt: int,
        seq: int,
        data: bytes,
        final: bool = False,
        *,
        done: tuple[str, str, str, int] | tuple[str, str, str] | None = None,
        told: int | None = None,
        life: Sequence[Any] | None = None,
    ) -> Coroutine[Any, Any, str]:
        """Queue an encoded event at once. Await what it returns for the event's id, when Redis has it.

        Events are numbered and queued in one order: call it for the next event of a trace before awaiting anything
        else. While Redis is away it waits. A cancelled append may still be carried out, so its number is spent.

        `final` gives it the greatest id of all and lets the trace expire, its blobs with it. `done`, a model, the trace
        of a queue entry, who holds it and from which take (its number), settles that entry in the same round trip, if
        it is held so; also where the event is refused, unless Redis has lost what was before it. `told` says that the
        event tells of all changes of live parameters up to that version. `life` is what the firehose is told of it, as
        `lifecycle_fields` makes it.

        Raises:
            Fenced: the stream holds this event or a later one, or lacks one before it that cannot be appended again.
            BusFull: Redis had no memory for it for too long. It was not appended, nor was what was queued behind it:
                their numbers are free again. All that follows fails likewise until `resume` is called.
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
        more: Callable[[str, bytes, str], tuple[Any, ...]] | None = None
        if final or seq == 0 or told is not None or life is not None:
            tag = keys.tag(trace)
            names = (
                *(key, keys.blobs(trace), keys.record(trace), keys.changes(trace), keys.operations(trace)),
                *(keys.deadlines(tag), keys.snapshot(trace), keys.firehose(tag)),
                *(keys.ended(tag), keys.ended_bytes(tag)),
            )
            keep = self._retention_s if final else UNFINISHED_S if seq == 0 else ""
            end, version = "1" if final else "", "" if told is None else told

            def more(schema: str, data: bytes, behind: str) -> tuple[Any, ...]:
                # The firehose is told with the event, and not again with a repeat of the rest.
                published = (life or ()) if schema else ()
                append = _APPEND_FINAL if final else _APPEND
                script = append(names, id_, schema, data, keep, end, version, attempt, trace, behind, *published)
                # With its text: what comes behind it in a pipeline must not overtake it.
                return _texted(script)

        settle = None if done is None else settle_command(keys, *done)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _Stream(keys.record(trace), keys.firehose(keys.tag(trace)))
            if self._look_at == 0.0:
                self._look_at = self._loop.time() + LOOK_S
        if attempt > stream.attempt:
            stream.attempt, stream.patient = attempt, True
        stream.over = False
        kept = msgspec.msgpack.encode([str(one) for one in life]) if life else b""
        item = _Append(stream, key, id_, attempt, data, final, more, kept, settle, self._loop.create_future())
        stream.under_way += 1
        self.backlog += item.size
        if stream.given_up:
            self._end(item, BusFull(f"Redis had no memory left for what was before event {id_}"))
            return self._outcome(item, None)
        self._queue.append(item)
        self._wanted.notify()
        return self._outcome(item, done)

    async def _outcome(self, item: _Append, done: tuple[Any, ...] | None) -> str:
        error = await item.outcome
        if error is not None:
            raise error
        if done is not None:
            self._settled(*done[:2])
        return item.id

    async def append(self, trace: str, attempt: int, seq: int, data: bytes, final: bool = False, **more: Any) -> str:
        """`queue`, and wait until Redis has it."""
        return await self.queue(trace, attempt, seq, data, final, **more)

    def resume(self, trace: str, attempt: int) -> int:
        """Go on after `BusFull`.

        Returns the number of the last event of this attempt that Redis has acknowledged, -1 if there is none.
        """
        stream = self._streams.get(self._keys.events(trace))
        if stream is not None:
            stream.given_up = False
        last = "" if stream is None else stream.kept[-1].id if stream.kept else stream.base
        if not last:
            return -1
        found, seq = parse_id(last)
        return seq if found == attempt else -1

    def hurry(self, trace: str) -> None:
        """This trace is to end: what Redis has no memory for now need not wait for it."""
        stream = self._streams.get(self._keys.events(trace))
        if stream is not None:
            stream.patient = False

    def forget(self, trace: str) -> None:
        """Nothing more will be appended to this trace for now."""
        key = self._keys.events(trace)
        stream = self._streams.get(key)
        if stream is not None:
            stream.over = True
            self._drop(key, stream)

    def _drop(self, key: str, stream: _Stream) -> None:
        if stream.over and not stream.kept and not stream.under_way and self._streams.get(key) is stream:
            del self._streams[key]

    # --- its task -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            if self._loop.time() >= self._look_at > 0.0:
                await self._look()
            if self._behind and self._loop.time() >= self._follow_at:
                await self._follow_up()
            batch = self._next_batch()
            if not batch:
                if not self._stuck and not self._behind:
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
        due = [self._look_at] if self._look_at > 0.0 else []
        if self._stuck:
            due.append(self._retry_at)
        if self._behind:
            due.append(self._follow_at)
        at = min(due, default=0.0)
        if at > 0.0 and (self._timer is None or self._timer.cancelled() or not self._rings_by(self._timer, at)):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(at, self._wanted.notify)

    def _rings_by(self, timer: asyncio.TimerHandle, at: float) -> bool:
        """Whether a timer is still to ring, and not after `at`."""
        return self._loop.time() < timer.when() <= at

    def _next_batch(self) -> list[_Append]:
        batch: list[_Append] = []
        size = 0
        streams: set[int] = set()

        def fits(item: _Append) -> bool:
            nonlocal size
            size += len(item.data)
            # A large one would have to pass through Lua if it followed another of its stream.
            if batch and (size > _FLUSH_BYTES or (item.large and id(item.stream) in streams)):
                return False
            streams.add(id(item.stream))
            batch.append(item)
            return True

        self._stuck = {key: stream for key, stream in self._stuck.items() if stream.stuck}
        self._retries = bool(self._stuck) and self._loop.time() >= self._retry_at
        probed: list[_Stream] = []
        if self._retries:
            for stream in self._stuck.values():
                if stream.stuck[0].moving:
                    probed.append(stream)
                    continue
                while stream.stuck and len(batch) < _FLUSH_ENTRIES and fits(stream.stuck[0]):
                    stream.stuck.popleft()
            size = min(size, _FLUSH_BYTES)
        while self._queue and len(batch) < _FLUSH_ENTRIES:
            item = self._queue[0]
            if item.key in self._stuck:
                item.stream.stuck.append(self._queue.popleft())
                continue
            if not fits(item):
                break
            self._queue.popleft()
        # Behind all else of their slots, which commands on several keys would hold up, and of each only the first.
        size = 0
        for stream in probed[:_PROBES]:
            size += len(stream.stuck[0].data)
            if stream is not probed[0] and size > _FLUSH_BYTES:
                break
            batch.append(stream.stuck.popleft())
        return batch

    def _end(self, item: _Append, error: Exception | None = None) -> None:
        if item.ended:
            return
        item.ended = True
        self.backlog -= item.size
        item.stream.under_way -= 1
        if item.final:
            item.stream.over = True
        self._drop(item.key, item.stream)
        if not item.outcome.done():
            item.outcome.set_result(error)

    def _keep(self, item: _Append) -> None:
        """Redis has it."""
        item.refused = False
        item.stream.kept.append(item)
        self._kept.append((self._loop.time(), item))
        self._kept_bytes += item.size
        if self._look_at == 0.0:
            self._look_at = self._loop.time() + LOOK_S

    def _prune(self, *, looked: bool) -> None:
        """All of Redis answers, if we have looked, and what it acknowledged longer ago is safe."""
        now = self._loop.time()
        safe = now - KEEP_S if looked else -math.inf
        while self._kept and (self._kept[0][0] <= safe or self._kept_bytes > KEEP_BYTES):
            _, item = self._kept.popleft()
            self._kept_bytes -= item.size
            stream = item.stream
            stream.base = item.id
            stream.kept.popleft()
            self._drop(item.key, stream)
        if looked:
            self._look_at = now + LOOK_S if self._streams else 0.0

    async def _flush(self, batch: list[_Append]) -> None:
        """Bring a batch into Redis, whatever it takes, and end every append in it that does not come to wait apart."""
        backoff = Backoff()
        waiting: dict[str, list[_Append]] = {}
        through: set[str] = set()
        while batch:
            count = len(batch)
            try:
                await self._connect()
                batch = self._unfenced(batch)
                commands, places = self._commands(batch)
                await self._link.prepare(*commands)
                if self._link.opened != self._whole:
                    # A server that is new to us has some of their streams: first what it lacks.
                    continue
                replies = await self._link.ask(*commands, stay=True, wait=False) if commands else []
            except Exception as error:
                if not is_transient(error):
                    raise as_bus_error(error) from error
                # Some of it may be there.
                for item in batch:
                    item.repeated = True
                problem = error
            else:
                opened = self._link.opened
                away = [reply for reply in replies if _is_away(reply)]
                batch = await self._take(batch, places, replies, waiting, through)
                if self._link.opened != opened:
                    # Not all of it was known when that server was brought up to date.
                    self._whole = -1
                if not batch:
                    break
                count, problem = len(batch), away[0]
                # Perhaps it is no primary any more.
                await self._link.drop()
            pause = backoff.next()
            logger.log(backoff.level, "%d entries wait for Redis: %s", count, problem)
            await anyio.sleep(pause)
        # Of a cluster, some nodes only.
        self._prune(looked=not self._several)
        if waiting or self._stuck:
            await self._wait_apart(waiting, through)

    async def _take(
        self,
        batch: list[_Append],
        places: list[int],
        replies: list[Any],
        waiting: dict[str, list[_Append]],
        through: set[str],
    ) -> list[_Append]:
        """See what came of a batch. Returns what a server that was not itself left of it, to be sent again."""
        again: list[_Append] = []
        held: set[str] = set()
        for item, place in zip(batch, places, strict=True):
            outcome = replies[place]
            if item.done is not None and not item.late:
                # What could not be done behind an event is done once more.
                behind = replies[place + 1]
                item.late = isinstance(behind, Exception) and is_transient(behind)
            if item.key in held or (_is_away(outcome) and item.key not in waiting):
                # What is behind it in its stream must not go before it.
                held.add(item.key)
                item.repeated = True
                again.append(item)
            elif not isinstance(outcome, Exception):
                self._keep(item)
                await self._conclude(item)
                through.add(item.key)
            elif item.key in waiting:
                waiting[item.key].append(item)
            elif is_full(outcome) or _is_on_its_way(outcome):
                item.refused = is_full(outcome)
                waiting[item.key] = [item]
            elif not _is_fence(outcome):
                self._end(item, as_bus_error(outcome))
            elif item.repeated and await self._holds(item):
                # With all that goes with it, but for its queue entry.
                item.late = True
                self._keep(item)
                await self._conclude(item)
                through.add(item.key)
            else:
                await self._conclude(item, Fenced(f"event {item.id} of {item.key} is not after the last one there"))
        return again

    def _unfenced(self, batch: list[_Append]) -> list[_Append]:
        """Those whose streams are as this writer left them."""
        lost = [item for item in batch if item.attempt <= item.stream.lost]
        for item in lost:
            self._end(item, Fenced(f"Redis has lost what was before event {item.id} of {item.key}, or has another's"))
        return [item for item in batch if item.attempt > item.stream.lost] if lost else batch

    def _commands(self, batch: list[_Append]) -> tuple[list[tuple[Any, ...]], list[int]]:
        """What appends a batch, and the places of the events' own commands."""
        commands: list[tuple[Any, ...]] = []
        places: list[int] = []
        last: dict[str, str] = {}
        for item in batch:
            behind = last.get(item.key, "")
            last[item.key] = item.id
            places.append(len(commands))
            if item.more is not None:
                commands.append(item.more(self._schema, item.data, behind))
            elif behind:
                commands.append(_texted(_AFTER((item.key,), item.id, self._schema, item.data, behind)))
            else:
                commands.append(("XADD", item.key, item.id, "v", self._schema, "d", item.data))
            if item.done is not None:
                # In the same round trip, unless there may be no memory yet for what it follows.
                item.late = bool(behind)
                if not item.late:
                    commands.append(item.done)
        return commands, places

    async def _conclude(self, item: _Append, error: Exception | None = None) -> None:
        """End an append, once the queue entry of its event is settled where that was not done with it."""
        if item.done is not None and item.late:
            (reply,) = await self._insist(item.done, moving=True)
            if _is_on_its_way(reply):
                return self._wait_behind(item.done, item, error)
        return self._end(item, error)

    def _wait_behind(self, command: tuple[Any, ...], item: _Append | None, error: Exception | None) -> None:
        if not self._behind:
            self._follow_at = self._loop.time() + RETRY_S
        self._behind[next(self._numbers)] = _Behind(command, item, error)

    async def _follow_up(self) -> None:
        """Try again some of what goes with events that Redis has, those first that were tried longest ago."""
        some = list(self._behind.items())[:_PROBES]
        done = 0
        try:
            # Each slot's in their order. A tuple: none waits for those of another slot.
            replies = await self._insist(*(tuple(one.command) for _, one in some), moving=True)
        except Exception as problem:
            logger.warning("what goes with %d events could not be carried out: %s", len(some), problem)
            for number, one in some:
                if one.item is not None and self._behind.pop(number, None) is not None:
                    self._end(one.item, problem)
        else:
            for (number, one), reply in zip(some, replies, strict=True):
                if self._behind.pop(number, None) is None:
                    continue
                if _is_on_its_way(reply):
                    self._behind[number] = one
                    continue
                done += 1
                if one.item is not None:
                    self._end(one.item, one.error)
        # Others come in between.
        self._follow_at = self._loop.time() + (0.0 if done else RETRY_S)
        self._warn()

    async def _holds(self, item: _Append) -> bool:
        """Whether the stream holds exactly this event."""
        (found,) = await self._insist(("XRANGE", item.key, item.id, item.id))
        return isinstance(found, list) and bool(found) and _field(found[0][1], b"d") == item.data

    async def _insist(self, *commands: tuple[Any, ...], moving: bool = False) -> list[Any]:
        """The replies to commands that may be carried out twice, whatever it takes.

        With `moving`, a `TryAgainError` for those whose slots are being moved.
        """
        backoff = Backoff()
        while True:
            try:
                await self._connect()
                replies = await self._link.ask(*commands, wait=False)
                if self._link.opened != self._whole:
                    # They came from a server that was not brought up to date.
                    continue
                if any(map(_is_away, replies)):
                    await self._link.drop()
                elif moving or not any(map(_is_on_its_way, replies)):
                    return replies
            except Exception as error:
                if not is_transient(error):
                    raise as_bus_error(error) from error
            await anyio.sleep(backoff.next())

    async def _wait_apart(self, waiting: dict[str, list[_Append]], through: set[str]) -> None:
        """Put what was refused back, in order, and give up what has waited for memory for too long."""
        now = self._loop.time()
        first = not self._stuck
        gained = any(key in through for key in self._stuck)
        for key, items in waiting.items():
            stream = items[0].stream
            # Whoever else waits is tried before it the next time.
            if self._stuck.pop(key, None) is None:
                stream.since = now
            self._stuck[key] = stream
            stream.stuck.extendleft(reversed(items))
        for key, stream in list(self._stuck.items()):
            if not stream.stuck:
                del self._stuck[key]
            elif key in through or not stream.stuck[0].refused:
                stream.since = now
            elif not stream.patient or now - stream.since > self.patience_s:
                del self._stuck[key]
                await self._give_up(key, stream)
        if self._retries or first:
            # At once, as long as that brings anything.
            self._retry_at = now if gained and not waiting else now + RETRY_S
        self._warn()

    def _warn(self) -> None:
        """Say it if a slot's move takes its time."""
        now = self._loop.time()
        moving = len(self._behind) + sum(not one.stuck[0].refused for one in self._stuck.values() if one.stuck)
        if not moving:
            self._moving_since = 0.0
        elif not self._moving_since:
            self._moving_since, self._say_at = now, now + _LONG_S
        elif now >= self._say_at:
            self._say_at = now + _LONG_S
            logger.warning(
                "%d events have waited for slots that are being moved, for %.0f s: has a move been broken off?",
                *(moving, now - self._moving_since),
            )

    async def _give_up(self, key: str, stream: _Stream) -> None:
        """Fail what waits of a stream, in which nothing may be missing."""
        items = [*stream.stuck, *(item for item in self._queue if item.key == key)]
        stream.stuck.clear()
        stream.given_up = True
        self._queue = deque(item for item in self._queue if item.key != key)
        logger.warning("Redis had no memory for %d events of %s for %g s", len(items), key, self.patience_s)
        error: BusFull | None = None
        for item in items:
            if error is None and item.repeated and await self._holds(item):
                item.late = True
                self._keep(item)
                await self._conclude(item)
                continue
            error = BusFull(f"Redis had no memory left for event {item.id} for {self.patience_s:g} s")
            self._end(item, error)

    # --- a server that comes back -------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        """Be connected to a server that has all that was acknowledged."""
        await self._link.connect()
        while self._whole != (opened := self._link.opened):
            # On a cluster that may open more of them.
            if self._whole != 0:
                await self._restore()
            self._whole = opened

    async def _look(self) -> None:
        """See whether the server is still there, and bring the one that is there up to date."""
        backoff = Backoff()
        while True:
            try:
                await self._connect()
                # On a cluster, every server that has any of them.
                looks = {self._connections.slot(key): ("EXISTS", key) for key in self._streams}
                for reply in await self._link.ask(*looks.values()) if looks else ():
                    if isinstance(reply, Exception):
                        raise reply
                if self._link.opened != self._whole:
                    continue
            except Exception as error:
                logger.log(backoff.level, "the writer waits for Redis: %s", error)
                if not is_transient(error):
                    logger.warning("the writer cannot look after its streams: %s", error)
                await anyio.sleep(backoff.next())
                if self._queue or self._stuck or self._behind:
                    self._look_at = self._loop.time() + LOOK_S
                    return
                continue
            self._prune(looked=True)
            return

    async def _restore(self) -> None:
        """Append again what a new server lacks, with all that goes with it.

        Raises:
            redis.exceptions.RedisError: the connection failed.
        """
        if claims := list(self.claims()):
            # In their order. What is short of memory among them is no more so than the events.
            for reply in await self._ask_all([with_text(claim) or claim for claim in claims]):
                # Also of one whose slot is being moved: what has been lost of it as well fences it, at worst.
                if isinstance(reply, Exception):
                    logger.warning("a trace could not be claimed again: %s", reply)
            self.claimed()
        if self._before is not None:
            await self._before()
        lacking = 0
        behind = {one.command for one in self._behind.values()}
        streams = list(self._streams.items())
        while streams:
            some: list[tuple[str, _Stream]] = []
            size = 0
            while streams and len(some) < 64 and size < _FLUSH_BYTES:
                some.append(streams.pop())
                size += sum(item.size for item in some[-1][1].kept)
            some = [(key, stream) for key, stream in some if stream.attempt > stream.lost and _told(stream)]
            after: list[tuple[Any, ...]] = []
            for (key, stream), reply in zip(
                some, await self._ask_all([self._restoring(key, stream) for key, stream in some]), strict=True
            ):
                if _is_on_its_way(reply):
                    reply = await self._see_whole(key, stream, reply)
                if isinstance(reply, Exception) or reply in (b"fenced", b"gap"):
                    logger.warning("stream %s cannot be brought up to date: %s", key, reply)
                    stream.lost = stream.attempt
                    continue
                lacking += reply if isinstance(reply, int) else 0
                # The firehose was told with the events.
                after += [item.more("", b"", "") for item in stream.kept if item.more is not None]
                after += [item.done for item in stream.kept if item.done is not None]
            for command, reply in zip(after, await self._ask_all(after), strict=True):
                # What settles an entry is not sent where anything before it was refused for now.
                if (_is_on_its_way(reply) or is_full(reply)) and command not in behind:
                    self._wait_behind(command, None, None)
        if lacking:
            logger.warning("Redis came back without %d events that it had acknowledged; it has them again", lacking)
        # This server may be gone in the next moment.
        now = self._loop.time()
        self._kept = deque((now, item) for _, item in self._kept)

    def _restoring(self, key: str, stream: _Stream) -> tuple[Any, ...]:
        kept = stream.kept
        whole = "1" if kept and kept[-1].final else ""
        parts = [part for item in kept for part in (item.id, item.data, item.life)]
        names = key, stream.record, stream.firehose
        return _texted(_RESTORE(names, self._schema, stream.base, whole, stream.attempt, *parts))

    async def _see_whole(self, key: str, stream: _Stream, problem: Exception) -> Any:
        """See what a stream lacks of which several keys cannot be asked for while its slot is being moved.

        Returns what `_RESTORE` would have replied.

        Raises:
            redis.exceptions.RedisError: it lacks something, and gets it when the slot has been moved; or the connection
                failed.
        """
        (entries,) = await self._ask_all([("XREVRANGE", key, "+", "-", "COUNT", 1)])
        if _is_on_its_way(entries):
            raise entries
        if isinstance(entries, Exception):
            return entries
        last = stream.kept[-1] if stream.kept else None
        found = entries[0][0].decode() if entries else "0-0"
        if parse_id(found) < parse_id(last.id if last else stream.base):
            raise problem
        if last is not None and found == last.id and _field(entries[0][1], b"d") != last.data:
            return b"fenced"
        return 0

    async def _ask_all(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        if not commands:
            return []
        replies = await self._link.ask(*commands, wait=False)
        for reply in replies:
            if _is_away(reply):
                raise reply
        return replies


def _told(stream: _Stream) -> bool:
    """Whether Redis has ever acknowledged anything of it."""
    return bool(stream.kept or stream.base)


def _texted(command: tuple[Any, ...]) -> tuple[Any, ...]:
    found = with_text(command)
    assert found is not None
    return found


def _is_on_its_way(reply: object) -> TypeGuard[Exception]:
    """Whether a cluster's node said that a slot is being moved."""
    from redis.exceptions import TryAgainError

    return isinstance(reply, TryAgainError)


def _is_away(reply: object) -> bool:
    """Whether a server said that it is not itself, other than for lack of memory or of a slot."""
    return isinstance(reply, Exception) and is_transient(reply) and not is_full(reply) and not _is_on_its_way(reply)


def _is_fence(error: Exception) -> bool:
    text = str(error)
    return text.startswith(("FENCED ", "BEHIND ")) or any(
        one in text for one in ("equal or smaller than", "exhausted the last possible ID")
    )


def _field(fields: Sequence[bytes], name: bytes) -> bytes | None:
    """A field of an entry as Redis replies it: names and values in turn."""
    for index in range(0, len(fields), 2):
        if fields[index] == name:
            return fields[index + 1]
    return None
