"""The firehose: what becomes of every trace, in a few small entries each, for whoever watches all of them.

There is one stream for each hash tag of traces, so that an entry is written by the script that changes the trace
itself: when it is queued, accepted, restarted, paused, resumed, and when it ends. The streams are bounded: each keeps
about 2000 entries, and goes a day after its last one. Who is away for longer misses what was trimmed meanwhile.

A `Watch` reads all of them over one connection, and says how far it is by one text. The
entries of a trace come in their order; those of different traces nearly so.

A `GroupWatch` is one of several readers that share the entries: each entry goes to
one of them, and is acknowledged when that one asks for the next. What a reader has not acknowledged for some time goes
to another. So each entry is handled at least once, and twice if a reader dies, or is slow, in the middle of one.
"""

from __future__ import annotations

import base64
import binascii
import logging
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Final, Self

import anyio
import msgspec

from tracewire_bus.transport.backoff import Backoff
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
    "parse_places",
]

logger = logging.getLogger("tracewire")

#: How long a stream is kept after its last entry, in seconds.
KEEP_S: Final = 24 * 3600

#: How many entries of a stream are read at once.
PAGE: Final = 64

BLOCK_S: Final = 5.0

#: How often a watch looks on a cluster, in seconds.
_POLL_S: Final = 0.2

Id = tuple[int, int]


class Lifecycle(msgspec.Struct, frozen=True, kw_only=True):
    """Something that became of a trace.

    Attributes:
        type: `queued` (submitted), `refused` (it was not queued after all: the queue was full), `accepted`,
            `restarted`, `paused`, `resumed`, or `final`. Newer versions may tell of more.
        trace_id: its id.
        model: name of the model that it was submitted to.
        client: name of the client that submitted it.
        engine: the engine that runs it, or ran it last; `""` if none did.
        attempt: which attempt it is, from 1 on; 0 before the first.
        time: when, in seconds since the epoch by Redis's clock.
        status: how it ended, of a final.
        error: type of the error that it ended with, if any.
        prompt_tokens, tokens: tokens of all its prompts, and of all that was generated, of a final that an engine
            wrote; None if nobody counted.
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
    """An entry's fields. Its client is added by the script, which knows the trace's record."""
    fields: list[Any] = ["k", kind, "t", trace, "m", model, "e", engine, "a", attempt]
    if status is not None:
        fields += ["s", status, "x", error]
    if usage is not None:
        fields += ["p", usage.prompt_tokens, "g", usage.completion_tokens]
    return fields


def _lifecycle(guard: Guard, key: str, id_: Id, flat: Sequence[bytes]) -> Lifecycle:
    fields = {name: value.decode("utf-8", "replace") for name, value in zip(flat[::2], flat[1::2], strict=True)}

    def number(name: bytes) -> int | None:
        # An entry stays in its place among those of its trace without its numbers.
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


def _written(places: Iterable[Id]) -> str:
    """Places in all streams as one text."""
    packed = zlib.compress(msgspec.msgpack.encode(list(places)))
    return "w1." + base64.urlsafe_b64encode(packed).decode()


def parse_places(text: str) -> list[Id]:
    """Places in all streams.

    Raises:
        ValueError: `text` is no position.
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
        raise ValueError(
            f"a watch begins at 'start', 'now', or a position that a watch told, not at {text[:60]!r}"
        ) from None
    return places


def entry_id(id_: Id) -> str:
    return f"{id_[0]}-{id_[1]}"


class LifecycleReader:
    """What both kinds of watch share: one connection that waits, and is opened anew when it breaks."""

    def __init__(self, connections: Connections, keys: Keys) -> None:
        self._link = connections.link()
        self._parser = connections.guard
        #: On a cluster no command waits for streams of several slots.
        self._polls = connections.clustered
        self._keys = keys
        self._names = [keys.firehose(tag) for tag in keys.tags]
        self._buffer: deque[tuple[str, Id, Lifecycle]] = deque()
        self._backoff = Backoff()
        self._guard = anyio.ResourceGuard("watching by")
        self._wait: anyio.CancelScope | None = None
        self._closed = False

    async def start(self) -> None:
        """Settle where it begins. Idempotent."""
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
        """Stop reading. Whoever waits for the next entry gets `ClosedResourceError`. Idempotent."""
        self._closed = True
        if self._wait is not None:
            self._wait.cancel()
        with anyio.CancelScope(shield=True):
            await self._link.drop()

    async def _ask(self, *commands: Sequence[Any], timeout_s: float = 30.0) -> list[Any] | None:
        """The replies; None where the connection broke or Redis is not itself, after a pause.

        Raises:
            anyio.ClosedResourceError: it is closed.
            BusError: Redis refuses.
        """
        if self._closed:
            raise anyio.ClosedResourceError
        replies: list[Any] | None = None
        try:
            with anyio.CancelScope() as self._wait:
                try:
                    replies = await self._link.ask(*commands, timeout_s=timeout_s)
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
                    logger.log(self._backoff.level, "a watch waits for Redis: %s", error)
                    await anyio.sleep(pause)
        finally:
            self._wait = None
        if self._closed:
            raise anyio.ClosedResourceError
        return replies

    async def _insist(self, *commands: Sequence[Any]) -> list[Any]:
        """The replies to what may be carried out twice, however long it takes."""
        while True:
            replies = await self._ask(*commands)
            if replies is not None:
                return replies

    async def _from_all(self, head: Sequence[Any], places: Iterable[str], wait_s: float = 0.0) -> list[Any] | None:
        """What a command that reads streams finds after these places in all of them, waiting so long for the first."""
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
        """Buffer what Redis replied, in the order of time. Returns what is only known by its id."""
        found, gone = [], []
        for key, entries in reply or ():
            name = key.decode()
            for raw, flat in entries:
                id_ = parse_id(raw.decode())
                if flat is None:
                    gone.append((name, id_))
                else:
                    found.append((name, id_, _lifecycle(self._parser, name, id_, flat)))
        found.sort(key=lambda one: one[1])
        self._buffer.extend(found)
        return gone


class Watch(LifecycleReader):
    """An async iterator over everything that becomes of traces from `since` on. It never ends by itself.

    `since` is `"start"` (what is there), `"now"` (what comes after `start`), or a `position`.
    """

    def __init__(self, connections: Connections, keys: Keys, since: str) -> None:
        super().__init__(connections, keys)
        places = None if since == "now" else [(0, 0)] * TAGS if since == "start" else parse_places(since)
        #: How far each stream was read, and handed out.
        self._read = None if places is None else dict(zip(self._names, places, strict=True))
        self._told = dict(self._read or {})

    async def start(self) -> None:
        """Fix where a watch since `"now"` begins. Idempotent. While Redis is away it waits.

        Raises:
            anyio.ClosedResourceError: it is closed.
            BusError: Redis refuses.
        """
        if self._read is None:
            replies = await self._insist(*(("XREVRANGE", name, "+", "-", "COUNT", 1) for name in self._names))
            self._read = {
                name: parse_id(reply[0][0].decode()) if reply else (0, 0)
                for name, reply in zip(self._names, replies, strict=True)
            }
            self._told = dict(self._read)

    @property
    def position(self) -> str:
        """After the last entry handed out, as a text to go on from: what it stands for is the watch's own business.

        `""` before a watch since `"now"` has started.
        """
        return _written(self._told[name] for name in self._names) if self._told else ""

    async def __anext__(self) -> Lifecycle:
        """The next entry, when there is one. While Redis is away it waits.

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
                reply = await self._from_all(("XREAD", "COUNT", PAGE), places, BLOCK_S)
                if reply is not None:
                    self._take(reply)
                    for name, id_, _ in self._buffer:
                        self._read[name] = max(self._read[name], id_)
            if self._closed:
                raise anyio.ClosedResourceError
            name, id_, event = self._buffer.popleft()
            self._told[name] = id_
            return event
