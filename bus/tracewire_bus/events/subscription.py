"""One consumer's place in a trace's event stream, and what it is handed."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Final, Protocol, Self

import anyio
import msgspec

from tracewire_bus.store.snapshots import Stored
from tracewire_bus.transport.backoff import Backoff
from tracewire_bus.transport.errors import BusError, BusUnavailable
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.tasks import Signal
from tracewire_bus.wire.ids import FINAL_ID, parse_id
from tracewire_bus.wire.packing import decoder

__all__ = [
    "GONE_S",
    "PAGE",
    "PAGES",
    "PAGE_MOST",
    "AttachableReader",
    "Entry",
    "EventsLost",
    "Gap",
    "Id",
    "Resync",
    "StreamGone",
    "Subscription",
    "parse_entries",
    "tail_id",
]

logger = logging.getLogger("tracewire")


Id = tuple[int, int]

Resync = Callable[[], Awaitable[Stored | None]]

#: How many entries are asked for at once: by the reader of each stream, and by a pull that does not know their size.
PAGE: Final = 32
#: How many a pull asks for at most.
PAGE_MOST: Final = 256
#: About how many the reader asks for of all streams together.
PAGES: Final = 1024
#: How long a trace must be gone to be gone for good, in seconds. A server that came back may lack it until its engine
#: or its client has written it again.
GONE_S: float = 10.0

#: When a buffer counts as full. A single page may be larger.
_BUFFER_ENTRIES, _BUFFER_BYTES = 256, 16 * 1024 * 1024

#: How often a subscription looks for entries that the reader has read and that are gone: for some seconds in all.
_MISSING_TRIES: Final = 12

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


def _number(id_: Id, entry: Entry) -> Id | None:
    """An entry's place in its trace: its id, but for a final, which says it itself."""
    if id_ < _FINAL:
        return id_
    try:
        place = _place(entry.data)
    except msgspec.MsgspecError:
        return None
    return place.attempt, place.seq


def _follows(last: Id, number: Id) -> bool:
    """Whether nothing is missing between two places of a trace: an attempt's events count from 0."""
    attempt, seq = number
    return seq <= last[1] + 1 if attempt == last[0] else attempt < last[0] or seq == 0


def parse_entries(reply: Sequence[Any]) -> list[tuple[Id, Entry]]:
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


class AttachableReader(Protocol):
    """What a subscription needs of the reader that serves it at the end of its stream."""

    def attach(self, subscription: Subscription) -> None:
        """Serve it from the reader's position in its stream on."""

    def detach(self, subscription: Subscription) -> None:
        """Serve it no more."""

    def position(self, key: str) -> Id | None:
        """How far the reader has read this stream."""


class Subscription:
    """An async iterator over one trace's entries, ending after the final one.

    It owns no task and holds no scope between its methods: iterate, drop and close it wherever you like. One task at a
    time may wait for its next entry; to leave early, call `aclose` (or leave its context).
    """

    def __init__(
        self,
        reader: AttachableReader,
        connections: Connections,
        key: str,
        since: str,
        resync: Resync | None = None,
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
        self._last: Id | None = (0, 0) if since == "start" else None if since == "now" else parse_id(since)
        #: The last entry handed out, or where it began.
        self._reached = self._last
        self.key = key
        self._buffer: deque[tuple[Id, Entry]] = deque()
        self._bytes = 0
        self._page = PAGE
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

    def _next_number(self) -> Id | None:
        """The place of the next entry, if nothing is missing before it."""
        id_, entry = self._buffer[0]
        number = _number(id_, entry)
        if number is None or self._resync is None:
            return id_
        assert self._reached is not None
        return number if _follows(self._reached, number) else None

    def _pop(self, number: Id) -> Entry:
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
        page = parse_entries(reply[0][1]) if reply else []
        complete = len(page) < self._page
        if not page and self.record and await self._gone():
            return
        if page:
            self.known = True
            self._gone_since = None
            self.take(page, bounded=False)
            mean = sum(len(entry.data) for _, entry in page) // len(page)
            self._page = max(1, min(PAGE_MOST, _BUFFER_BYTES // max(1, mean)))
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
    def last(self) -> Id:
        """Id of the last entry in the buffer or before."""
        assert self._last is not None
        return self._last

    def attached(self, yes: bool) -> None:
        """The reader has taken it up, or let it go; then it pulls when asked for more than its buffer holds."""
        if self._attached != yes:
            self._attached = yes
            self._arrived.notify()

    def take(self, entries: list[tuple[Id, Entry]], *, bounded: bool = True) -> bool:
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


async def tail_id(connections: Connections, key: str) -> str:
    """Id of a stream's last entry, `"0-0"` if it has none."""
    reply = await connections.command("XREVRANGE", key, "+", "-", "COUNT", 1, alone=True)
    return reply[0][0].decode() if reply else "0-0"
