"""Reading traces' streams: first what is there, then what comes, without a gap or a repeat.

A `Subscription` goes through two states. Behind the stream's end it *pulls*: it
fetches pages by itself when its consumer asks for more. At the end it is *attached* to the bus's one reader, whose
connection blocks on all attached streams at once and puts what comes into each subscription's buffer. A buffer is
bounded: one that is full is detached, and its subscription pulls again when its consumer has caught up with it. So a
slow consumer costs a page of memory and no one's time, and nothing is ever dropped.

The two meet in one rule. The reader has read each stream up to a *position*; a subscription may attach if it has come
at least that far, and takes only entries after its own last.

Entries may have been trimmed. An attempt's ids are consecutive, so a subscription sees by the next entry whether some
are gone. In their place it hands out a `Gap` with the folded state after them.

A whole trace may be gone: it had ended, and its time was over, or it was dropped to make room. Nothing is written then
that would wake who waits, so the reader looks at times whether the traces that it reads are there still.

On a cluster, where one command waits for streams of one slot, there is a reader for each slot of traces.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self

import anyio
import msgspec
from anyio.lowlevel import checkpoint

from tracewire_bus.store.keys import FINAL_ID, parse_id
from tracewire_bus.store.snapshots import Stored
from tracewire_bus.transport.backoff import Backoff
from tracewire_bus.transport.errors import BusError, BusUnavailable, is_transient
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.tasks import OwnedTask, Signal
from tracewire_bus.wire.packing import decoder

__all__ = ["Entry", "EventsLost", "Gap", "Reader", "SlotReaders", "StreamGone", "Subscription", "tail_id"]

logger = logging.getLogger("tracewire")

_Id = tuple[int, int]
_Resync = Callable[[], Awaitable[Stored | None]]

#: Entries asked for at once: by the reader for each stream, and by a pull before it knows how large they are.
_PAGE: Final = 32
_PAGE_MOST: Final = 256
#: By the reader for all streams, about.
_PAGES: Final = 1024
#: When a buffer counts as full. A single page may be larger.
_BUFFER_ENTRIES, _BUFFER_BYTES = 256, 16 * 1024 * 1024
#: How often is looked for what the reader has read and is not there any more: some seconds.
_MISSING_TRIES: Final = 12
#: How often the reader looks whether its traces are there, in seconds; and how long one must be gone to be gone for
#: good: a server that came back may lack it until its engine or its client has written it again.
LOOK_S: float = 5.0
GONE_S: float = 10.0
_BLOCK_S: Final = 5.0
#: On a cluster: what waits at a node does not hear of what is written to a key that is being moved from there.
_BLOCK_SLOT_S: Final = 1.0
_FINAL: Final = parse_id(FINAL_ID)


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One entry of a trace's stream: its id, the encoded event, and the schema it was written in."""

    id: str
    data: bytes
    schema: str

    @property
    def final(self) -> bool:
        """Whether it is its trace's last."""
        return self.id == FINAL_ID


class Gap(msgspec.Struct, frozen=True, gc=False):
    """Entries that are gone: those after `since` (`"start"`: all) up to and with `until`.

    What follows goes on from `snapshot`, the folded state at `until`.
    """

    since: str
    until: str
    snapshot: Stored


class EventsLost(BusError):
    """Entries that a subscription should have read next are gone, and no snapshot holds what they came to.

    Somebody trimmed the stream by hand, or removed its snapshot. `since` is the last one that was read, `until` the
    first that is there.
    """

    def __init__(self, since: str, until: str) -> None:
        self.since = since
        self.until = until
        super().__init__(
            f"the events after {since!r} and before {until} are gone, and there is no snapshot of what they came to: "
            f"the stream was trimmed by somebody else than its engine"
        )


class StreamGone(BusError, LookupError):
    """A trace that was there is there no more: it had ended, and its time was over, or it was dropped to make room.

    `since` is the last entry that was read, or `"start"`.
    """

    def __init__(self, key: str, since: str) -> None:
        self.since = since
        super().__init__(
            f"{key}: what follows {since!r} is gone with its trace, which had ended and was kept no longer: its time "
            f"was over, or newer traces needed the room"
        )


class _Place(msgspec.Struct, array_like=True):
    """Just enough of an event to see its number."""

    kind: str
    attempt: int
    seq: int


_place = decoder(_Place)


def _number(id_: _Id, entry: Entry) -> _Id | None:
    """An entry's place in its trace: its id, but for a final, which says it itself."""
    if id_ < _FINAL:
        return id_
    try:
        place = _place(entry.data)
    except msgspec.MsgspecError:
        return None
    return place.attempt, place.seq


def _follows(last: _Id, number: _Id) -> bool:
    """Whether nothing is missing between two places of a trace: an attempt's events count from 0."""
    attempt, seq = number
    return seq <= last[1] + 1 if attempt == last[0] else attempt < last[0] or seq == 0


def _entries(reply: Sequence[Any]) -> list[tuple[_Id, Entry]]:
    """Entries as Redis replies them: `[id, [name, value, ...]]`. Foreign fields are ignored, missing ones empty."""
    parsed = []
    for id_, flat in reply:
        if flat and len(flat) == 4 and flat[0] == b"v" and flat[2] == b"d":
            schema, data = flat[1], flat[3]
        else:
            fields = dict(zip(flat[::2], flat[1::2], strict=True)) if flat else {}
            schema, data = fields.get(b"v", b""), fields.get(b"d", b"")
        text = id_.decode()
        attempt, _, seq = text.partition("-")
        parsed.append(((int(attempt), int(seq)), Entry(text, data, schema.decode("ascii", "replace"))))
    return parsed


class Subscription:
    """An async iterator over one trace's entries, ending after the final one.

    It owns no task and holds no scope between its methods: iterate, drop and close it wherever you like. One task at a
    time may wait for its next entry; to leave early, call `aclose` (or leave its context).
    """

    def __init__(
        self,
        reader: Reader,
        connections: Connections,
        key: str,
        since: str,
        resync: _Resync | None = None,
        record: str = "",
    ) -> None:
        self._reader = reader
        self._resync = resync
        #: The key of its trace's record, and whether the trace is known to be, or to have been, there.
        self.record = record
        self.known = since not in ("start", "now", "0-0")
        self._new = False
        self._gone_since: float | None = None
        self._connections = connections
        self._last: _Id | None = (0, 0) if since == "start" else None if since == "now" else parse_id(since)
        #: The last entry handed out, or where it began.
        self._reached = self._last
        self.key = key
        self._buffer: deque[tuple[_Id, Entry]] = deque()
        self._bytes = 0
        self._page = _PAGE
        self._handed_out = "" if since in ("start", "now") else since
        self._arrived = Signal()
        self._missing = Backoff(0.05, 0.5)
        self._guard = anyio.ResourceGuard("reading from")
        self._attached = False
        self._over = False
        self._closed = False

    async def start(self) -> None:
        """Fix where a subscription since `"now"` begins: after what is there at this moment. Idempotent.

        Without it, that moment is when the first entry is asked for.

        Raises:
            BusUnavailable: Redis could not be reached.
        """
        if self._last is None:
            last = await tail_id(self._connections, self.key)
            if self._last is None:
                self._last = self._reached = parse_id(last)

    def expect(self, *, new: bool = False) -> None:
        """Its trace is there: should it be found gone, that is no trace to wait for, but an error.

        Of a `new` one, nothing is to be caught up with.
        """
        self.known = True
        self._new = new

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def position(self) -> str:
        """Id of the last entry handed out, or the one it began after, `""` if none: read on from there with `since`."""
        return self._handed_out

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Entry | Gap:
        """The next entry, when there is one; or a gap, where entries that should come next are gone.

        While Redis is away it waits.

        Raises:
            StopAsyncIteration: after the final entry.
            anyio.ClosedResourceError: the subscription or its bus is closed.
            anyio.BusyResourceError: another task waits for the next entry.
            EventsLost: entries are gone, and there is no snapshot of what they came to.
            StreamGone: all of the trace is gone.
            BusError: Redis refuses to read this stream.
        """
        with self._guard:
            while True:
                if self._closed:
                    raise anyio.ClosedResourceError
                if self._buffer:
                    if (number := self._next_number()) is not None:
                        return self._pop(number)
                    if (gap := await self._skip()) is not None:
                        return gap
                    continue
                if self._over:
                    raise StopAsyncIteration
                if self._attached:
                    await self._arrived.wait()
                else:
                    await self._pull()

    async def aclose(self) -> None:
        """Stop reading. Whoever waits for the next entry gets `ClosedResourceError`. Idempotent."""
        self._closed = True
        self._reader.detach(self)
        self._buffer.clear()
        self._arrived.notify()

    def _next_number(self) -> _Id | None:
        """The place of the next entry, if nothing is missing before it."""
        id_, entry = self._buffer[0]
        number = _number(id_, entry)
        if number is None or self._resync is None:
            return id_
        assert self._reached is not None
        return number if _follows(self._reached, number) else None

    def _pop(self, number: _Id) -> Entry:
        _, entry = self._buffer.popleft()
        self._bytes -= len(entry.data)
        self._handed_out = entry.id
        self._reached = number
        return entry

    async def _skip(self) -> Gap | None:
        """Go on from the snapshot: what should come next is gone. None if it is to be tried again."""
        assert self._resync is not None
        assert self._reached is not None
        try:
            snapshot = await self._resync()
        except BusUnavailable as error:
            logger.warning("a subscription waits for Redis: %s", error)
            return None
        if self._closed:
            return None
        since = self._handed_out or ("start" if self._reached == (0, 0) else f"{self._reached[0]}-{self._reached[1]}")
        if snapshot is None or (at := (snapshot.attempt, snapshot.seq)) <= self._reached:
            raise EventsLost(since, self._buffer[0][1].id)
        while self._buffer and self._buffer[0][0] <= at:
            self._bytes -= len(self._buffer.popleft()[1].data)
        self._last = max(self.last, at)
        self._reached, self._handed_out = at, snapshot.id
        return Gap(since, snapshot.id, snapshot)

    async def _pull(self) -> None:
        """Fetch the next page, and attach if that was the last one."""
        try:
            await self.start()
            if self.last >= _FINAL:
                self._over = True
                return
            new, self._new = self._new, False
            if new and self.last == (0, 0):
                self._reader.attach(self)
                return
            seen = self._reader.position(self.key)
            where = f"{self.last[0]}-{self.last[1]}"
            reply = await self._connections.command(
                "XREAD", "COUNT", self._page, "STREAMS", self.key, where, alone=True
            )
        except BusUnavailable as error:
            # The bus waited a while; a consumer waits as long as it likes.
            logger.warning("a subscription waits for Redis: %s", error)
            return
        if self._closed:
            return
        page = _entries(reply[0][1]) if reply else []
        complete = len(page) < self._page
        if not page and self.record and await self._gone():
            return
        if page:
            self.known = True
            self._gone_since = None
            self.take(page, bounded=False)
            mean = sum(len(entry.data) for _, entry in page) // len(page)
            self._page = max(1, min(_PAGE_MOST, _BUFFER_BYTES // max(1, mean)))
        elif seen is not None and seen > self.last:
            # The reader had come further before we asked, and what it read is gone: trimmed, or the key has expired.
            # Or else a server that came back lacks it, and its writer is about to append it again.
            if self._missing.failures < _MISSING_TRIES:
                await anyio.sleep(self._missing.next())
                return
            self._last = seen
        self._missing.reset()
        if complete and not self._over:
            self._reader.attach(self)

    async def _gone(self) -> bool:
        """Whether nothing of its trace is there, though it was once. Waits a while, in which it may come back.

        Raises:
            StreamGone: it has been so for too long.
        """
        try:
            # One by one: a slot that is being moved answers to nothing else.
            there = sum(await self._connections.commands(("EXISTS", self.key), ("EXISTS", self.record)))
        except BusUnavailable as error:
            logger.warning("a subscription waits for Redis: %s", error)
            return True
        if there or not self.known:
            self.known = self.known or bool(there)
            self._gone_since = None
            return False
        now = anyio.current_time()
        if self._gone_since is None or self._connections.broken_at >= self._gone_since:
            self._gone_since = now
        if now - self._gone_since >= GONE_S:
            raise StreamGone(self.key, self._handed_out or "start")
        await anyio.sleep(min(self._missing.next(), GONE_S))
        return True

    # --- the reader's side --------------------------------------------------------------------------------------------

    @property
    def last(self) -> _Id:
        """Id of the last entry in the buffer or before."""
        assert self._last is not None
        return self._last

    def attached(self, yes: bool) -> None:
        """The reader has taken it up, or let it go; then it pulls when asked for more than its buffer holds."""
        if self._attached != yes:
            self._attached = yes
            self._arrived.notify()

    def take(self, entries: list[tuple[_Id, Entry]], *, bounded: bool = True) -> bool:
        """Buffer what comes after its last entry, as far as there is room. Returns whether it wants more."""
        for id_, entry in entries:
            if id_ <= self.last:
                continue
            if bounded and (len(self._buffer) >= _BUFFER_ENTRIES or self._bytes >= _BUFFER_BYTES):
                self._arrived.notify()
                return False
            self._buffer.append((id_, entry))
            self._bytes += len(entry.data)
            self._last = id_
            self._over = id_ >= _FINAL
        self._arrived.notify()
        return not self._over and len(self._buffer) < _BUFFER_ENTRIES and self._bytes < _BUFFER_BYTES


class _Stream:
    """One stream that the reader reads: how far it is, and for whom. It keeps no subscription alive."""

    __slots__ = ("_references", "position")

    def __init__(self, position: _Id) -> None:
        self.position = position
        self._references: dict[int, weakref.ref[Subscription]] = {}

    def __bool__(self) -> bool:
        return bool(self._references)

    def add(self, subscription: Subscription) -> None:
        key, references = id(subscription), self._references
        references[key] = weakref.ref(subscription, lambda _: references.pop(key, None))

    def discard(self, subscription: Subscription) -> None:
        self._references.pop(id(subscription), None)

    def subscriptions(self) -> list[Subscription]:
        """Those that are still there."""
        return [one for reference in list(self._references.values()) if (one := reference()) is not None]


class Reader:
    """Reads all streams at whose end a subscription waits, on one connection.

    While that connection blocks, it cannot be told of another stream. `CLIENT UNBLOCK` from another connection ends the
    wait; where Redis does not allow that command, the connection is closed and opened anew.

    On a cluster all its streams share the slot of `near`, a key.
    """

    def __init__(self, connections: Connections, near: str = "") -> None:
        self._connections = connections
        self._link = connections.link(near)
        self._block_s = _BLOCK_SLOT_S if near else _BLOCK_S
        self._streams: dict[str, _Stream] = {}
        self._all: weakref.WeakSet[Subscription] = weakref.WeakSet()
        self._wanted = anyio.Event()
        self._poked = anyio.Event()
        #: Counts the streams ever taken up; and how many of them the wait under way knows.
        self._taken_up = 0
        self._known = 0
        self._wait: anyio.CancelScope | None = None
        self._looked = -math.inf
        #: Its connection's name to Redis, and as the how manyth it was opened.
        self._client_id: Any = None
        self._identified = 0
        self._may_unblock = True
        self._task: OwnedTask | None = None

    def start(self) -> None:
        """Start its task."""
        self._task = OwnedTask(self._run, "that reads traces")

    async def connect(self) -> None:
        """Connect before it has anything to read. If that fails, it connects when it has."""
        try:
            await self._identify()
        except Exception as error:
            logger.debug("the reader did not connect ahead: %r", error)
            await self._link.drop()

    async def _identify(self) -> None:
        (self._client_id,) = await self._link.ask(("CLIENT", "ID"))
        self._identified = self._link.opened
        self._may_unblock = self._may_unblock and not isinstance(self._client_id, Exception)

    async def aclose(self) -> None:
        """End its task, close its connection and every subscription."""
        for subscription in list(self._all):
            await subscription.aclose()
        task, self._task = self._task, None
        if task is not None:
            await task.aclose()
        await self._link.drop()

    # --- subscriptions ------------------------------------------------------------------------------------------------

    def subscribe(self, key: str, since: str, resync: _Resync | None = None, record: str = "") -> Subscription:
        """A new subscription, which it will close in the end if its consumer does not.

        `resync` finds the stream's snapshot. Without it, entries that are gone are passed over. `record` is the key of
        the trace's record, by which a trace that is gone is told from one that has not begun.
        """
        subscription = Subscription(self, self._connections, key, since, resync, record)
        self._all.add(subscription)
        return subscription

    def position(self, key: str) -> _Id | None:
        """How far a stream has been read, if it is being read."""
        stream = self._streams.get(key)
        return stream.position if stream is not None else None

    def attach(self, subscription: Subscription) -> None:
        """Take up a subscription, unless its stream has been read further than it is: then it must pull once more."""
        stream = self._streams.get(subscription.key)
        if stream is None:
            stream = self._streams[subscription.key] = _Stream(subscription.last)
            self._taken_up += 1
            self._wanted.set()
            self._poked.set()
        elif stream.position > subscription.last:
            return
        stream.add(subscription)
        subscription.attached(True)

    def detach(self, subscription: Subscription) -> None:
        """Let a subscription go. Harmless if it is not attached."""
        stream = self._streams.get(subscription.key)
        if stream is not None:
            stream.discard(subscription)
            if not stream:
                del self._streams[subscription.key]
        subscription.attached(False)

    # --- its task -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._wake)
            await self._read()

    async def _read(self) -> None:
        backoff = Backoff()
        while True:
            try:
                await self._look()
                reply, asked = await self._block()
                backoff.reset()
                for key, entries in reply:
                    name = key.decode()
                    self._deliver(name, asked[name], _entries(entries))
                # Those who got something have it before more is asked for.
                await checkpoint()
            except Exception as error:
                await self._failed(error, backoff)

    async def _look(self) -> None:
        """Let go of those whose traces are gone: each finds out by itself, when it pulls."""
        now = anyio.current_time()
        if not self._streams or now - self._looked < LOOK_S:
            return
        self._looked = now
        waiting = [
            one for stream in self._streams.values() for one in stream.subscriptions() if one.record and one.known
        ]
        if not waiting:
            return
        # Nearly always all are there, which one command tells.
        records = {one.record for one in waiting}
        (count,) = await self._link.ask(("EXISTS", *records))
        if count == len(records):
            return
        found = await self._link.ask(*(("EXISTS", key) for one in waiting for key in (one.key, one.record)))
        for one, events, record in zip(waiting, found[::2], found[1::2], strict=True):
            if events == record == 0:
                self.detach(one)

    async def _block(self) -> tuple[Any, dict[str, _Id]]:
        """Wait for entries of any stream taken up. Returns the reply and the positions it begins after."""
        for key in [key for key, stream in self._streams.items() if not stream]:
            # Its last subscription was dropped without being closed.
            del self._streams[key]
        if not self._streams:
            self._wanted = anyio.Event()
            await self._wanted.wait()
        if not self._link.connected or self._link.opened != self._identified:
            await self._identify()
        # Nothing awaits between here and the wait: a stream taken up from now on is one that the wait does not know.
        asked = {key: stream.position for key, stream in self._streams.items()}
        if not asked:
            return (), asked
        self._known = self._taken_up
        reply: Any = None
        try:
            with anyio.CancelScope() as self._wait:
                (reply,) = await self._link.ask(
                    (
                        *("XREAD", "COUNT", max(2, min(_PAGE, _PAGES // len(asked)))),
                        *("BLOCK", round(self._block_s * 1000), "STREAMS"),
                        *asked,
                        *(f"{attempt}-{seq}" for attempt, seq in asked.values()),
                    ),
                    timeout_s=self._block_s + 10,
                )
        finally:
            self._wait = None
        if isinstance(reply, Exception):
            raise reply
        return reply or (), asked

    async def _failed(self, error: Exception, backoff: Backoff) -> None:
        from redis.exceptions import TryAgainError

        await self._link.drop()
        pause = backoff.next()
        # While a slot is being moved its streams lie on two nodes: each is to be had, but not all at once. Nor may
        # what all have be, in the time that there is.
        apart = isinstance(error, (TryAgainError, TimeoutError))
        if is_transient(error) and not apart:
            logger.log(backoff.level, "the reader waits for Redis: %s", error)
        else:
            # Perhaps one stream is no stream. Each subscription finds out by itself whether it is its own.
            level = logging.DEBUG if isinstance(error, TryAgainError) else logging.WARNING
            logger.log(level, "the reader lets go of %d streams: %r", len(self._streams), error)
            for stream in list(self._streams.values()):
                for subscription in stream.subscriptions():
                    self.detach(subscription)
        await anyio.sleep(pause)

    def _deliver(self, key: str, asked: _Id, entries: list[tuple[_Id, Entry]]) -> None:
        stream = self._streams.get(key)
        if stream is None or not entries or asked > stream.position:
            # Let go meanwhile; or taken up again from further back, where this reply would leave a gap.
            return
        stream.position = max(stream.position, entries[-1][0])
        for subscription in stream.subscriptions():
            if not subscription.take(entries):
                self.detach(subscription)

    async def _wake(self) -> None:
        """End the reader's wait whenever a stream was taken up that it does not know."""
        while True:
            await self._poked.wait()
            self._poked = anyio.Event()
            backoff = Backoff(0.001, 0.5)
            # Redis may get this before the command it should end: then it has no effect, and is sent again.
            while self._wait is not None and self._known < self._taken_up:
                await self._interrupt(self._wait)
                await anyio.sleep(backoff.next())

    async def _interrupt(self, wait: anyio.CancelScope) -> None:
        if self._may_unblock:
            try:
                (reply,) = await self._connections.once(("CLIENT", "UNBLOCK", self._client_id), beside=self._link)
            except Exception as error:
                logger.debug("the reader could not be woken: %r", error)
                return
            if not isinstance(reply, Exception):
                return
            logger.info("Redis does not let the reader be woken (%s); it reconnects instead", reply)
            self._may_unblock = False
        wait.cancel()


class SlotReaders:
    """A reader for each slot of a cluster that somebody reads from."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._readers: dict[int | None, Reader] = {}

    def subscribe(self, key: str, since: str, resync: _Resync | None = None, record: str = "") -> Subscription:
        """A new subscription, of its slot's reader."""
        slot = self._connections.slot(key)
        reader = self._readers.get(slot)
        if reader is None:
            reader = self._readers[slot] = Reader(self._connections, key)
            reader.start()
        return reader.subscribe(key, since, resync, record)

    async def aclose(self) -> None:
        """Close them all."""
        readers = list(self._readers.values())
        self._readers.clear()
        for reader in readers:
            await reader.aclose()


async def tail_id(connections: Connections, key: str) -> str:
    """Id of a stream's last entry, `"0-0"` if it has none."""
    reply = await connections.command("XREVRANGE", key, "+", "-", "COUNT", 1, alone=True)
    return reply[0][0].decode() if reply else "0-0"
