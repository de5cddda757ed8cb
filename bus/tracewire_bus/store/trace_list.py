"""The traces that the lifecycle streams tell of, from the newest submission back.

Redis keeps about 2000 lifecycle entries for each hash tag, for a day. The list has the traces whose submission is among
them, with how far each had come by its last entry. A page of the list reads the streams from their ends, since later
entries have the later states of a trace.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec

from tracewire_bus.transport.pool import Connections
from tracewire_bus.wire.ids import parse_id

from .keys import TAGS, Keys
from .lifecycle import Id, Lifecycle, lifecycle_of

__all__ = ["ListedTrace", "Place", "list_traces", "parse_place"]

#: How many entries of one stream one read fetches.
_PAGE: Final = 32

#: Where a trace stands in the list: the id of its submission's entry, and the number of the entry's stream.
Place = tuple[int, int, int]


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


class _Stream:
    """One lifecycle stream, read from its end back."""

    def __init__(self, number: int, key: str) -> None:
        self.number = number
        self.key = key
        self.entries: list[tuple[Id, Lifecycle]] = []
        self.over = False
        self._until = "+"

    def command(self) -> tuple[Any, ...]:
        """The command that reads the next entries."""
        return ("XREVRANGE", self.key, self._until, "-", "COUNT", _PAGE)

    def take(self, reply: Any, connections: Connections) -> None:
        """Take the reply to `command`."""
        for raw, flat in reply:
            id_ = parse_id(raw.decode())
            self.entries.append((id_, lifecycle_of(connections.guard, self.key, id_, flat)))
        self.entries.reverse()
        self.over = len(reply) < _PAGE
        if reply:
            self._until = f"({reply[-1][0].decode()}"


async def list_traces(connections: Connections, keys: Keys, before: Place | None = None) -> AsyncIterator[ListedTrace]:
    """The traces, the newest submission first: all, or those whose place is before `before`.

    Raises:
        BusError: Redis refuses.
        BusUnavailable: Redis does not answer.
    """
    streams = [_Stream(number, keys.firehose(tag)) for number, tag in enumerate(keys.tags)]
    replies = await connections.commands(*(stream.command() for stream in streams))
    for stream, reply in zip(streams, replies, strict=True):
        stream.take(reply, connections)
    #: The next entry of each stream, newest first.
    heap = [_next(stream) for stream in streams if stream.entries]
    heapq.heapify(heap)
    later: dict[str, list[Lifecycle]] = {}
    while heap:
        number = heapq.heappop(heap)[-1]
        stream = streams[number]
        id_, event = stream.entries.pop()
        if not stream.entries and not stream.over:
            (reply,) = await connections.commands(stream.command())
            stream.take(reply, connections)
        if stream.entries:
            heapq.heappush(heap, _next(stream))
        if event.type != "queued":
            later.setdefault(event.trace_id, []).append(event)
            continue
        place = (*id_, number)
        known = later.pop(event.trace_id, [])
        if (before is None or place < before) and not any(one.type == "refused" for one in known):
            yield _listed(event, place, known)


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
        place="-".join(map(str, place)),
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
