"""Batches of appends for one round trip, and the streams whose appends wait apart."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from . import deferred
from .appends import Append, Stream

__all__ = ["Batch", "StuckStreams"]

#: Most appends of one round trip.
_ENTRIES: Final = 512
#: Most bytes of events of one round trip.
ROUND_BYTES: int = 8 * 1024 * 1024


class Batch:
    """The appends of one round trip."""

    def __init__(self) -> None:
        self.items: list[Append] = []
        self._bytes = 0
        self._streams: set[int] = set()

    @property
    def full(self) -> bool:
        """Whether the batch has the greatest number of appends."""
        return len(self.items) >= _ENTRIES

    def add(self, item: Append) -> bool:
        """Add an append. Returns False if it does not fit."""
        self._bytes += len(item.data)
        # A large append behind another one of its stream would have to pass through Lua.
        if self.items and (self._bytes > ROUND_BYTES or (item.large and id(item.stream) in self._streams)):
            return False
        self._streams.add(id(item.stream))
        self.items.append(item)
        return True


class StuckStreams:
    """The streams whose appends wait for memory or for a slot's move, in the order of their last tries."""

    def __init__(self, give_up_after_s: Callable[[], float]) -> None:
        self._give_up_after_s = give_up_after_s
        self.streams: dict[str, Stream] = {}
        #: When to try them again, by the event loop's clock.
        self.retry_at = 0.0
        #: Whether the batch under way tries them.
        self._retries = False

    def __bool__(self) -> bool:
        return bool(self.streams)

    def __contains__(self, key: str) -> bool:
        return key in self.streams

    @property
    def moving(self) -> int:
        """Number of streams that wait for a slot's move."""
        return sum(not stream.stuck[0].refused for stream in self.streams.values() if stream.stuck)

    def clear(self) -> list[Append]:
        """Drop all streams. Returns the appends that waited."""
        items = [item for stream in self.streams.values() for item in stream.stuck]
        self.streams.clear()
        return items

    def retry(self, batch: Batch, now: float) -> list[Stream]:
        """If a retry is due, add waiting appends to a batch. Returns the streams that wait for a slot's move."""
        self.streams = {key: stream for key, stream in self.streams.items() if stream.stuck}
        self._retries = bool(self.streams) and now >= self.retry_at
        probed: list[Stream] = []
        if self._retries:
            for stream in self.streams.values():
                if stream.stuck[0].moving:
                    probed.append(stream)
                    continue
                while stream.stuck and not batch.full and batch.add(stream.stuck[0]):
                    stream.stuck.popleft()
        return probed

    def probe(self, batch: Batch, probed: list[Stream]) -> None:
        """Add the first append of each of these streams to a batch.

        They come last in the batch, since a refused command on several keys delays later commands of its slot.
        """
        size = 0
        for stream in probed[: deferred.PROBES]:
            size += len(stream.stuck[0].data)
            if stream is not probed[0] and size > ROUND_BYTES:
                break
            batch.items.append(stream.stuck.popleft())

    def put_back(self, waiting: dict[str, list[Append]], through: set[str], now: float) -> list[tuple[str, Stream]]:
        """Let refused appends wait, in order.

        `waiting` has the refused appends of each stream, `through` the streams of which Redis took an append, and `now`
        is the event loop's time. Removes and returns the streams that have waited for memory for too long.
        """
        first = not self.streams
        gained = any(key in through for key in self.streams)
        for key, items in waiting.items():
            stream = items[0].stream
            # Moves the stream behind all others that wait.
            if self.streams.pop(key, None) is None:
                stream.since = now
            self.streams[key] = stream
            stream.stuck.extendleft(reversed(items))
        given_up: list[tuple[str, Stream]] = []
        for key, stream in list(self.streams.items()):
            if not stream.stuck:
                del self.streams[key]
            elif key in through or not stream.stuck[0].refused:
                stream.since = now
            elif not stream.patient or now - stream.since > self._give_up_after_s():
                del self.streams[key]
                given_up.append((key, stream))
        if self._retries or first:
            # At once, as long as Redis takes some of them.
            self.retry_at = now if gained and not waiting else now + deferred.RETRY_S
        return given_up

    def take(self, queue: deque[Append], batch: Batch) -> None:
        """Move appends from a queue to a batch while they fit. Those of a waiting stream join that stream instead."""
        while queue and not batch.full:
            item = queue[0]
            if item.key in self.streams:
                item.stream.stuck.append(queue.popleft())
                continue
            if not batch.add(item):
                break
            queue.popleft()
