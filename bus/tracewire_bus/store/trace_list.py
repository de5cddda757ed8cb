"""The traces that the lifecycle streams tell of, from the newest submission back.

Redis keeps about 2000 lifecycle entries for each hash tag, for a day. The list has the traces whose submission is among
them, with how far each had come by its last entry. A page of the list reads the streams back from its beginning. For a
trace without an end among these entries, it reads the trace's stream from there on, too: later entries have the later
states of a trace.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import anyio.lowlevel
import msgspec

from tracewire_bus.transport.pool import Connections
from tracewire_bus.wire.ids import parse_id

from .keys import TAGS, Keys
from .lifecycle import Id, Lifecycle, entry_id, lifecycle_of

__all__ = ["ListedTrace", "Place", "TraceScan", "parse_place", "place_text"]

#: How many entries of one stream the first read fetches, and how many a later one at most.
_PAGE: Final = 32
_MOST_PAGE: Final = 256
#: After so many entries other tasks have a turn.
_TURN: Final = 512

#: Where a trace stands in the list: the id of its submission's entry, and the number of the entry's stream.
Place = tuple[int, int, int]
#: An entry of a stream: its id, and its fields, names and values in turn.
Entry = tuple[Id, Sequence[bytes]]


class ListedTrace(msgspec.Struct, frozen=True, kw_only=True):
    """A trace as its lifecycle entries tell of it.

    Attributes:
        trace_id: the trace's id.
        place: its place in the list, for `before` of the next page.
        model, client: the model it was submitted to, and the client that submitted it.
        state: `queued`, `running`, `paused`, or how it ended (`finished`, `stopped`, `cancelled`, `expired`,
            `rejected`, `failed`).
        engine: the engine that ran it last; `""` if none did.
        attempt: its last attempt, from 1 on; 0 before the first.
        queued_at: when it was submitted, in seconds since the epoch by Redis's clock.
        ended_at: when it ended, or None.
        error: the type of the error that it ended with, or None.
        prompt_tokens, tokens: the number of tokens of all prompts and of generated tokens, if an engine ended it.
    """

    trace_id: str
    place: str
    model: str
    client: str
    state: str
    engine: str
    attempt: int
    queued_at: float
    ended_at: float | None = None
    error: str | None = None
    prompt_tokens: int | None = None
    tokens: int | None = None


def parse_place(text: str) -> Place:
    """A place from its text.

    Raises:
        ValueError: `text` is none.
    """
    parts = text.split("-")
    if len(parts) != 3 or not all(part.isdecimal() and len(part) <= 20 for part in parts) or int(parts[2]) >= TAGS:
        raise ValueError(f"expected the place of a trace in a list, got {text[:60]!r}")
    return int(parts[0]), int(parts[1]), int(parts[2])


def place_text(place: Place) -> str:
    """A place as text, which `parse_place` reads."""
    return "-".join(map(str, place))


class _Stream:
    """One lifecycle stream, read back from `before`, or from its end. `entries` are undecoded, the oldest first."""

    def __init__(self, number: int, key: str, before: Place | None) -> None:
        self.number = number
        self.key = key
        self.entries: list[Entry] = []
        self.over = False
        self._until = self._since = "+"
        if before is not None:
            # An entry of the same id is behind the place if its stream has a lower number.
            outside, inside = f"({entry_id(before[:2])}", entry_id(before[:2])
            self._until, self._since = (inside, outside) if number < before[2] else (outside, inside)
        self._later: dict[bytes, list[Entry]] | None = None

    def command(self, count: int) -> tuple[Any, ...]:
        """The command that reads the next entries."""
        return ("XREVRANGE", self.key, self._until, "-", "COUNT", count)

    async def later(self, trace: bytes, connections: Connections) -> list[Entry]:
        """The entries of a trace from `before` on, the last one first."""
        if self._later is None:
            self._later = {}
            (reply,) = await connections.commands(("XREVRANGE", self.key, "+", self._since))
            for raw, flat in reply:
                self._later.setdefault(_head(flat)[1], []).append((parse_id(raw.decode()), flat))
        return self._later.get(trace, [])

    def take(self, reply: Any, count: int) -> None:
        """Take the reply to `command`."""
        found = [(parse_id(raw.decode()), flat) for raw, flat in reversed(reply)]
        self.entries = found + self.entries
        self.over = len(reply) < count
        if reply:
            self._until = f"({reply[-1][0].decode()}"


class TraceScan:
    """The traces, the newest submission first: all, or those whose place is before `before`, with ids of one prefix.

    Attributes:
        stopped_at: where the scan has stopped since it has read `most` entries; None if it has not. A further scan
            goes on from there.

    Raises, in its iteration:
        BusError: Redis refuses.
        BusUnavailable: Redis does not answer.
    """

    def __init__(
        self,
        connections: Connections,
        keys: Keys,
        before: Place | None = None,
        *,
        id_prefix: str = "",
        most: int | None = None,
    ) -> None:
        self.stopped_at: Place | None = None
        self._connections = connections
        self._streams = [_Stream(number, keys.firehose(tag), before) for number, tag in enumerate(keys.tags)]
        self._before = before
        self._prefix = id_prefix.encode("utf-8", "surrogatepass")
        self._most = most
        self._page = _PAGE
        self._most_page = _MOST_PAGE if most is None else max(_PAGE, min(_MOST_PAGE, most // len(self._streams)))

    async def __aiter__(self) -> AsyncIterator[ListedTrace]:
        """The traces, read as they are asked for."""
        later: dict[bytes, list[Entry]] = {}
        count = 0
        async for stream, entry in self._entries():
            place = (*entry[0], stream.number)
            kind, trace = _head(entry[1])
            if not trace.startswith(self._prefix):
                pass
            elif kind != b"queued":
                later.setdefault(trace, []).append(entry)
            elif (found := await self._found(stream, place, entry, later.pop(trace, []))) is not None:
                yield found
            count += 1
            if count == self._most:
                self.stopped_at = place
                return
            if count % _TURN == 0:
                await anyio.lowlevel.checkpoint()

    async def _found(self, stream: _Stream, place: Place, queued: Entry, known: list[Entry]) -> ListedTrace | None:
        """A trace from its submission and its later entries, the last one first; None if it was refused."""
        if self._before is not None and not any(_head(flat)[0] == b"final" for _, flat in known):
            known = await stream.later(_head(queued[1])[1], self._connections) + known
        if any(_head(flat)[0] == b"refused" for _, flat in known):
            return None
        first, *others = (lifecycle_of(self._connections.guard, stream.key, *one) for one in (queued, *known))
        return _listed(first, place, others)

    async def _entries(self) -> AsyncIterator[tuple[_Stream, Entry]]:
        """The entries of all streams, the newest first."""
        await self._refill()
        #: The next entry of each stream, newest first.
        heap = [_next(stream) for stream in self._streams if stream.entries]
        heapq.heapify(heap)
        while heap:
            stream = self._streams[heapq.heappop(heap)[-1]]
            yield stream, stream.entries.pop()
            if not stream.entries and not stream.over:
                await self._refill()
            if stream.entries:
                heapq.heappush(heap, _next(stream))

    async def _refill(self) -> None:
        """Read the next entries of all streams that have few left, in one round trip, and more of them each time."""
        few = [one for one in self._streams if not one.over and len(one.entries) <= self._page // 4]
        replies = await self._connections.commands(*(one.command(self._page) for one in few))
        for stream, reply in zip(few, replies, strict=True):
            stream.take(reply, self._page)
        self._page = min(self._most_page, 2 * self._page)


def _head(flat: Sequence[bytes]) -> tuple[bytes, bytes]:
    """The kind of an entry and its trace, undecoded."""
    if len(flat) >= 4 and flat[0] == b"k" and flat[2] == b"t":
        return flat[1], flat[3]
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    return fields.get(b"k", b""), fields.get(b"t", b"")


def _next(stream: _Stream) -> tuple[int, int, int, int]:
    (milliseconds, count), _ = stream.entries[-1]
    return -milliseconds, -count, -stream.number, stream.number


def _listed(queued: Lifecycle, place: Place, known: list[Lifecycle]) -> ListedTrace:
    """A trace from its submission and its later entries, the last one first."""
    states = {"accepted": "running", "restarted": "running", "resumed": "running", "paused": "paused"}
    final = next((one for one in known if one.type == "final"), None)
    state = next((states[one.type] for one in known if one.type in states), "queued")
    return ListedTrace(
        trace_id=queued.trace_id,
        place=place_text(place),
        model=queued.model,
        client=queued.client,
        state=state if final is None else final.status or "failed",
        engine=next((one.engine for one in known if one.engine), ""),
        attempt=max((one.attempt for one in known), default=0),
        queued_at=queued.time,
        ended_at=None if final is None else final.time,
        error=None if final is None else final.error,
        prompt_tokens=None if final is None else final.prompt_tokens,
        tokens=None if final is None else final.tokens,
    )
