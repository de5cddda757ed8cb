"""Lifecycle events of all traces, on streams of their own (the *firehose*).

A trace has an entry when it is queued, accepted, restarted, paused or resumed, and when it ends. There is one stream
for each hash tag of traces, so that the script that changes the trace also writes the entry. A stream keeps about 2000
entries and expires a day after its last one. A reader that is away for longer misses the trimmed entries.

A `Watch` reads all streams over one connection. Its position in all of them is one text. The entries of one trace are
in order, those of different traces nearly so.

`watch_groups.py` has readers that share the entries.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Final, Self

import anyio
import msgspec

from tracewire_bus.transport.backoff import Backoff, outages
from tracewire_bus.transport.errors import as_bus_error, is_transient
from tracewire_bus.transport.guard import Guard, integer
from tracewire_bus.transport.pool import Connections
from tracewire_bus.wire.ids import parse_id
from tracewire_bus.wire.messages import Status, Usage

from .keys import TAGS, Keys

__all__ = [
    "BLOCK_S",
    "KEEP_S",
    "PAGE",
    "Id",
    "Lifecycle",
    "LifecycleReader",
    "Watch",
    "entry_id",
    "lifecycle_fields",
    "lifecycle_of",
    "parse_places",
]

#: How long Redis keeps a stream after its last entry, in seconds.
KEEP_S: Final = 24 * 3600

#: Number of entries of a stream that one read returns at most.
PAGE: Final = 64

#: How long one read waits for the first entry, in seconds.
BLOCK_S: Final = 5.0

#: How often a watch polls on a cluster, in seconds.
_POLL_S: Final = 0.2

#: The id of an entry: milliseconds, and number within the millisecond.
Id = tuple[int, int]


class Lifecycle(msgspec.Struct, frozen=True, kw_only=True):
    """A lifecycle event of a trace.

    Attributes:
        type: `queued` (submitted), `refused` (withdrawn, since the queue was full), `accepted`, `restarted`, `paused`,
            `resumed`, or `final`. Newer versions may have more.
        trace_id: the trace's id.
        model: name of the model that the trace was submitted to.
        client: name of the client that submitted the trace.
        engine: the engine that runs the trace, or ran it last; `""` if none did.
        attempt: the attempt, from 1 on; 0 before the first.
        time: time of the event, in seconds since the epoch by Redis's clock.
        status: of a `final`, how the trace ended.
        error: of a `final`, the type of the error that the trace ended with, if any.
        prompt_tokens, tokens: of a `final` that an engine wrote, the number of tokens of all prompts and of generated
            tokens; otherwise None.
    """

    type: str
    trace_id: str
    model: str = ""
    client: str = ""
    engine: str = ""
    attempt: int = 0
    time: float = 0.0
    status: str | None = None
    error: str | None = None
    prompt_tokens: int | None = None
    tokens: int | None = None


def lifecycle_fields(
    kind: str,
    trace: str,
    *,
    model: str,
    engine: str = "",
    attempt: int = 0,
    status: Status | None = None,
    error: str = "",
    usage: Usage | None = None,
) -> list[Any]:
    """The fields of a lifecycle entry, names and values in turn. The script adds the client from the trace's record."""
    fields: list[Any] = ["k", kind, "t", trace, "m", model, "e", engine, "a", attempt]
    if status is not None:
        fields += ["s", status, "x", error]
    if usage is not None:
        fields += ["p", usage.prompt_tokens, "g", usage.completion_tokens]
    return fields


def lifecycle_of(guard: Guard, key: str, id_: Id, flat: Sequence[bytes]) -> Lifecycle:
    """A lifecycle event from the fields of its entry."""
    fields = {name: value.decode("utf-8", "replace") for name, value in zip(flat[::2], flat[1::2], strict=True)}

    def number(name: bytes) -> int | None:
        # An entry whose numbers are malformed is kept without them.
        return guard.read(integer, fields[name], key=key, entry=entry_id(id_)) if name in fields else None

    return Lifecycle(
        type=fields.get(b"k", ""),
        trace_id=fields.get(b"t", ""),
        model=fields.get(b"m", ""),
        client=fields.get(b"c", ""),
        engine=fields.get(b"e", ""),
        attempt=number(b"a") or 0,
        time=id_[0] / 1000,
        status=fields.get(b"s"),
        error=fields.get(b"x") or None,
        prompt_tokens=number(b"p"),
        tokens=number(b"g"),
    )


def _format_places(places: Iterable[Id]) -> str:
    """The positions in all streams as one text, which `parse_places` reads."""
    packed = zlib.compress(msgspec.msgpack.encode(list(places)))
    return "w1." + base64.urlsafe_b64encode(packed).decode()


def parse_places(text: str) -> list[Id]:
    """Read the positions in all streams from a `Watch.position`.

    Raises:
        ValueError: `text` is not a position.
    """
    version, dot, packed = text.partition(".")
    try:
        if version != "w1" or not dot or len(packed) > 10_000:
            raise ValueError(text)
        unpacker = zlib.decompressobj()
        places = msgspec.msgpack.decode(
            unpacker.decompress(base64.urlsafe_b64decode(packed), 10_000), type=list[tuple[int, int]]
        )
        if len(places) != TAGS or any(min(place) < 0 for place in places):
            raise ValueError(text)
    except (ValueError, binascii.Error, zlib.error, msgspec.MsgspecError):
        raise ValueError(f"a watch begins at 'start', 'now', or a watch's position, not at {text[:60]!r}") from None
    return places


def entry_id(id_: Id) -> str:
    return f"{id_[0]}-{id_[1]}"


class LifecycleReader:
    """Base of both kinds of watch: one connection that waits for entries, and that reopens after it breaks."""

    def __init__(self, connections: Connections, keys: Keys) -> None:
        self._link = connections.link()
        self._parser = connections.guard
        #: On a cluster no command can wait for streams of several slots, so a watch polls.
        self._polls = connections.clustered
        self._keys = keys
        self._names = [keys.firehose(tag) for tag in keys.tags]
        self._buffer: deque[tuple[str, Id, Lifecycle]] = deque()
        self._backoff = Backoff()
        self._guard = anyio.ResourceGuard("watching by")
        self._wait: anyio.CancelScope | None = None
        self._closed = False

    async def start(self) -> None:
        """Find the position where the watch begins. Idempotent."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def aclose(self) -> None:
        """Stop reading. A task that waits for the next entry gets `ClosedResourceError`. Idempotent."""
        self._closed = True
        if self._wait is not None:
            self._wait.cancel()
        with anyio.CancelScope(shield=True):
            await self._link.drop()

    async def _ask(self, *commands: Sequence[Any], timeout_s: float = 30.0) -> list[Any] | None:
        """Execute commands. Returns the replies, or None after a pause if the connection broke or Redis is not ready.

        Raises:
            anyio.ClosedResourceError: the watch is closed.
            BusError: Redis refuses.
        """
        if self._closed:
            raise anyio.ClosedResourceError
        replies: list[Any] | None = None
        try:
            with anyio.CancelScope() as self._wait:
                try:
                    replies = await self._link.execute(*commands, timeout_s=timeout_s)
                    for reply in replies:
                        if isinstance(reply, Exception):
                            raise reply
                    self._backoff.reset()
                except Exception as error:
                    replies = None
                    if not is_transient(error):
                        raise as_bus_error(error) from error
                    await self._link.drop()
                    pause = self._backoff.next()
                    outages.log(self._backoff.level, "a watch waits for Redis: %s", error)
                    await anyio.sleep(pause)
        finally:
            self._wait = None
        if self._closed:
            raise anyio.ClosedResourceError
        return replies

    async def _ask_until_answered(self, *commands: Sequence[Any]) -> list[Any]:
        """Execute idempotent commands, again and again until Redis answers. Returns the replies."""
        while True:
            replies = await self._ask(*commands)
            if replies is not None:
                return replies

    async def _read_all(self, head: Sequence[Any], places: Iterable[str], wait_s: float = 0.0) -> list[Any] | None:
        """Read all streams after these positions by the command `head`, waiting up to `wait_s` seconds for an entry.

        Returns the streams with their entries, or None as `_ask` does.
        """
        if not self._polls:
            wait = ("BLOCK", max(1, round(wait_s * 1000))) if wait_s else ()
            replies = await self._ask((*head, *wait, "STREAMS", *self._names, *places), timeout_s=wait_s + 30)
            return None if replies is None else replies[0] or []
        each = zip(self._names, places, strict=True)
        replies = await self._ask(*((*head, "STREAMS", name, place) for name, place in each))
        if replies is None:
            return None
        found = [one for reply in replies for one in reply or ()]
        if wait_s and not found:
            with anyio.CancelScope() as self._wait:
                await anyio.sleep(min(wait_s, _POLL_S))
            self._wait = None
        return found

    def _take(self, reply: Any) -> list[tuple[str, Id]]:
        """Buffer the entries of a reply, sorted by time. Returns stream and id of each entry that was trimmed."""
        found, gone = [], []
        for key, entries in reply or ():
            name = key.decode()
            for raw, flat in entries:
                id_ = parse_id(raw.decode())
                if flat is None:
                    gone.append((name, id_))
                else:
                    found.append((name, id_, lifecycle_of(self._parser, name, id_, flat)))
        found.sort(key=lambda one: one[1])
        self._buffer.extend(found)
        return gone


class Watch(LifecycleReader):
    """An async iterator over the lifecycle events of all traces from `since` on. It never ends by itself.

    `since` is `"start"` (the oldest entry), `"now"` (entries after the call of `start`), or a `position`.
    """

    def __init__(self, connections: Connections, keys: Keys, since: str) -> None:
        super().__init__(connections, keys)
        places = None if since == "now" else [(0, 0)] * TAGS if since == "start" else parse_places(since)
        #: For each stream, the last entry that was read, and the last one that was returned.
        self._read = None if places is None else dict(zip(self._names, places, strict=True))
        self._returned = dict(self._read or {})

    async def start(self) -> None:
        """Find the streams' ends, if `since` is `"now"`. Idempotent. Waits while Redis does not answer.

        Raises:
            anyio.ClosedResourceError: the watch is closed.
            BusError: Redis refuses.
        """
        if self._read is None:
            replies = await self._ask_until_answered(
                *(("XREVRANGE", name, "+", "-", "COUNT", 1) for name in self._names)
            )
            self._read = {
                name: parse_id(reply[0][0].decode()) if reply else (0, 0)
                for name, reply in zip(self._names, replies, strict=True)
            }
            self._returned = dict(self._read)

    @property
    def position(self) -> str:
        """The position after the last returned entry, as an opaque text for `since`.

        `""` until a watch since `"now"` has started.
        """
        return _format_places(self._returned[name] for name in self._names) if self._returned else ""

    async def __anext__(self) -> Lifecycle:
        """The next entry. Waits until there is one.

        Raises:
            anyio.ClosedResourceError: the watch or its bus is closed.
            anyio.BusyResourceError: another task waits for the next entry.
            BusError: Redis refuses.
        """
        with self._guard:
            await self.start()
            assert self._read is not None
            while not self._buffer:
                places = map(entry_id, self._read.values())
                reply = await self._read_all(("XREAD", "COUNT", PAGE), places, BLOCK_S)
                if reply is not None:
                    self._take(reply)
                    for name, id_, _ in self._buffer:
                        self._read[name] = max(self._read[name], id_)
            if self._closed:
                raise anyio.ClosedResourceError
            name, id_, event = self._buffer.popleft()
            self._returned[name] = id_
            return event
