"""Subscriptions: one consumer's position in a trace's stream, and the entries that it yields."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Final, Protocol, Self

import anyio
import msgspec

from tracewire_bus.store.snapshots import Stored
from tracewire_bus.transport.backoff import Backoff, outages
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
    "RECENT",
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

#: An entry's id: attempt and sequence number.
Id = tuple[int, int]

#: Reads a trace's snapshot.
Resync = Callable[[], Awaitable[Stored | None]]

#: Entries per read: of the reader for each stream, and of a pull before the entries' size is known.
PAGE: Final = 32
#: Most entries of one pull.
PAGE_MOST: Final = 256
#: About how many entries the reader asks for in one read of all streams.
PAGES: Final = 1024
#: With how many of a stream's last entries a subscription since `"recent"` begins.
RECENT: Final = 32
#: How long a known trace must be missing before a subscription raises `StreamGone`, in seconds. After a restart, Redis
#: may lack a trace until its engine or its client has written it again.
GONE_S: float = 10.0

#: The numbers of entries and of bytes at which a buffer is full. A single page may be larger.
_BUFFER_ENTRIES, _BUFFER_BYTES = 256, 16 * 1024 * 1024

#: How often a subscription asks again for entries that the reader has read and that are missing: some seconds in all.
_MISSING_TRIES: Final = 12

_FINAL: Final = parse_id(FINAL_ID)


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One entry of a trace's stream: its id, the encoded event, and the event's schema."""

    id: str
    data: bytes
    schema: str

    @property
    def final(self) -> bool:
        """Whether this is the trace's final event."""
        return self.id == FINAL_ID


class Gap(msgspec.Struct, frozen=True, gc=False):
    """Trimmed entries: those after `since` (`"start"` for all) up to and including `until`.

    `snapshot` is the folded state after `until`; the next entry follows it.
    """

    since: str
    until: str
    snapshot: Stored


class EventsLost(BusError):
    """The next entries of a subscription are missing, and there is no snapshot of the state after them.

    Another process than the trace's engine trimmed the stream or removed its snapshot.

    Attributes:
        since: id of the last entry that was read, or `"start"`.
        until: id of the first remaining entry.
    """

    def __init__(self, since: str, until: str) -> None:
        self.since = since
        self.until = until
        super().__init__(
            f"the events after {since!r} and before {until} are missing, and there is no snapshot of the state after "
            f"them: another process than the trace's engine trimmed the stream"
        )


class StreamGone(BusError, LookupError):
    """The trace was removed while it was read: it had ended, and has expired or was dropped for newer traces.

    `since` is the id of the last entry that was read, or `"start"`.
    """

    def __init__(self, key: str, since: str) -> None:
        self.since = since
        super().__init__(
            f"{key} was removed while it was read, after {since!r}: the trace had ended, and its retention was over or "
            f"newer traces needed the room"
        )


class _Place(msgspec.Struct, array_like=True):
    """The first fields of an encoded event, up to its number."""

    kind: str
    attempt: int
    seq: int


_place = decoder(_Place)


def _number_in(entry: Entry) -> Id | None:
    """The attempt and number inside an encoded event; None if they are malformed."""
    try:
        place = _place(entry.data)
    except msgspec.MsgspecError:
        return None
    return place.attempt, place.seq


def _follows(last: Id, number: Id) -> bool:
    """Whether no event is missing between two numbers of a trace. The events of an attempt count from 0."""
    attempt, seq = number
    return seq <= last[1] + 1 if attempt == last[0] else attempt < last[0] or seq == 0


def parse_entries(reply: Sequence[Any]) -> list[tuple[Id, Entry]]:
    """Decode entries, replied as `[id, [name, value, ...]]`. Ignores unknown fields; missing ones become empty."""
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
    """The part of a reader that a subscription uses."""

    def attach(self, subscription: Subscription) -> None:
        """Deliver the stream's entries after the reader's position to the subscription."""

    def detach(self, subscription: Subscription) -> None:
        """Stop delivering entries to the subscription."""

    def position(self, key: str) -> Id | None:
        """The reader's position in a stream; None if it does not read the stream."""


class Subscription:
    """An async iterator over one trace's entries. It ends after the final one.

    The subscription owns no task and no cancel scope, so any task may iterate, drop or close it. One task at a time may
    wait for the next entry. To stop early, call `aclose` or leave its context.
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
        #: The key of the trace's record, and whether the trace is known to exist or to have existed.
        self.record = record
        self.known = since not in ("start", "now", "recent", "0-0")
        self._new = False
        self._gone_since: float | None = None
        self._connections = connections
        #: How many of the stream's last entries to begin with, until the subscription has found them.
        self._back = {"now": 0, "recent": RECENT}.get(since)
        self._last: Id | None = (0, 0) if since == "start" else parse_id(since) if self._back is None else None
        #: The number of the last entry that was yielded, or where the subscription began.
        self._reached = self._last
        self.key = key
        self._buffer: deque[tuple[Id, Entry]] = deque()
        self._bytes = 0
        self._page = PAGE
        self._yielded = "" if since in ("start", "now", "recent") else since
        self._arrived = Signal()
        self._missing = Backoff(0.05, 0.5)
        self._outage = Backoff()
        self._guard = anyio.ResourceGuard("reading from")
        self._attached = False
        self._over = False
        self._closed = False

    async def start(self) -> None:
        """Find the stream's present end, if `since` is `"now"` or `"recent"`. Idempotent.

        Without this call, such a subscription finds the stream's end when the first entry is asked for.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        if self._last is None:
            last = await tail_id(self._connections, self.key, self._back or 0)
            if self._last is None:
                self._last = self._reached = parse_id(last)

    def expect(self, *, new: bool = False) -> None:
        """Note that the trace exists: if it is missing later, the subscription raises `StreamGone` instead of waiting.

        `new` says that the trace was just submitted, so the subscription attaches without a first pull.
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
        """Id of the last yielded entry, or of the one that it began after; `""` if none. Another `since` may use it."""
        return self._yielded

    @property
    def ready(self) -> bool:
        """Whether an entry is here, so that the next one takes no waiting for Redis."""
        return bool(self._buffer)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Entry | Gap:
        """The next entry, or a gap in place of trimmed entries. Waits until there is one, also while Redis is away.

        Raises:
            StopAsyncIteration: after the final entry.
            anyio.ClosedResourceError: the subscription or its bus is closed.
            anyio.BusyResourceError: another task waits for the next entry.
            EventsLost: entries are missing, and there is no snapshot of the state after them.
            StreamGone: the trace has expired or was dropped.
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
        """Stop reading. A task that waits for the next entry gets `ClosedResourceError`. Idempotent."""
        self._closed = True
        self._reader.detach(self)
        self._buffer.clear()
        self._arrived.notify()

    def _next_number(self) -> Id | None:
        """The number of the next buffered entry; None if entries are missing before it."""
        id_, entry = self._buffer[0]
        # The id of a final has not its number.
        number = id_ if id_ < _FINAL else _number_in(entry)
        if number is None or self._resync is None:
            return id_
        assert self._reached is not None
        return number if _follows(self._reached, number) else None

    def _pop(self, number: Id) -> Entry:
        _, entry = self._buffer.popleft()
        self._bytes -= len(entry.data)
        self._yielded = entry.id
        self._reached = number
        return entry

    async def _skip(self) -> Gap | None:
        """Go on from the snapshot, since the next entries are missing. Returns None if Redis does not answer."""
        assert self._resync is not None
        assert self._reached is not None
        try:
            snapshot = await self._resync()
        except BusUnavailable as error:
            await self._wait_for_redis(error)
            return None
        self._outage.reset()
        if self._closed:
            return None
        since = self._yielded or ("start" if self._reached == (0, 0) else f"{self._reached[0]}-{self._reached[1]}")
        if snapshot is None or (at := (snapshot.attempt, snapshot.seq)) <= self._reached:
            raise EventsLost(since, self._buffer[0][1].id)
        while self._buffer and self._buffer[0][0] <= at:
            self._bytes -= len(self._buffer.popleft()[1].data)
        self._last = max(self.last, at)
        self._reached, self._yielded = at, snapshot.id
        return Gap(since, snapshot.id, snapshot)

    async def _pull(self) -> None:
        """Fetch the next page, and attach to the reader if that was the last one."""
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
                "XREAD", "COUNT", self._page, "STREAMS", self.key, where, unbatched=True
            )
        except BusUnavailable as error:
            # A consumer waits longer than the bus does.
            await self._wait_for_redis(error)
            return
        self._outage.reset()
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
            # The reader has read further than this pull finds: the entries are trimmed, or the key has expired, or a
            # restarted server lacks them until their writer appends them again.
            if self._missing.failures < _MISSING_TRIES:
                await anyio.sleep(self._missing.next())
                return
            self._last = seen
        self._missing.reset()
        if complete and not self._over:
            self._reader.attach(self)

    async def _gone(self) -> bool:
        """Whether a known trace is missing. If so, waits before it returns, since the trace may be written again.

        Raises:
            StreamGone: the trace has been missing for `GONE_S` seconds.
        """
        try:
            # Two commands: while a slot is being moved, a command on two keys is refused.
            there = sum(await self._connections.commands(("EXISTS", self.key), ("EXISTS", self.record)))
        except BusUnavailable as error:
            await self._wait_for_redis(error)
            return True
        if there or not self.known:
            self.known = self.known or bool(there)
            self._gone_since = None
            return False
        now = anyio.current_time()
        if self._gone_since is None or self._connections.broken_at >= self._gone_since:
            self._gone_since = now
        if now - self._gone_since >= GONE_S:
            raise StreamGone(self.key, self._yielded or "start")
        await anyio.sleep(min(self._missing.next(), GONE_S))
        return True

    async def _wait_for_redis(self, error: BusUnavailable) -> None:
        """Pause before the next try, or until the subscription is closed."""
        pause = self._outage.next()
        outages.log(self._outage.level, "a subscription waits for Redis: %s", error)
        with anyio.move_on_after(pause):
            while not self._closed:
                await self._arrived.wait()

    # --- the reader's side --------------------------------------------------------------------------------------------

    @property
    def last(self) -> Id:
        """Id of the last entry that was buffered or yielded."""
        assert self._last is not None
        return self._last

    def attached(self, yes: bool) -> None:
        """Note that the reader has attached or detached this subscription."""
        if self._attached != yes:
            self._attached = yes
            self._arrived.notify()

    def take(self, entries: list[tuple[Id, Entry]], *, bounded: bool = True) -> bool:
        """Buffer the entries after the last one, while there is room. Returns whether there is room for more."""
        buffer, last = self._buffer, self.last
        for id_, entry in entries:
            if id_ <= last:
                continue
            if bounded and self._full:
                break
            buffer.append((id_, entry))
            self._bytes += len(entry.data)
            self._last = last = id_
            self._over = id_ >= _FINAL
        self._arrived.notify()
        return not self._over and not self._full

    @property
    def _full(self) -> bool:
        return len(self._buffer) >= _BUFFER_ENTRIES or self._bytes >= _BUFFER_BYTES


async def tail_id(connections: Connections, key: str, back: int = 0) -> str:
    """Id of a stream's last entry, or of the one that `back` entries come after; `"0-0"` if it has none."""
    reply = await connections.command("XREVRANGE", key, "+", "-", "COUNT", back + 1, unbatched=True)
    return reply[back][0].decode() if len(reply) > back else "0-0"
