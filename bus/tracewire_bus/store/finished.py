"""Finished traces: their number, their size, and the bounds over them.

Redis keeps the stream, record, snapshot and blobs of a finished trace for `retention_s` seconds; then the keys expire.
A bound over all finished traces drops the oldest ones sooner (`Finished.drop_beyond`).

The script that ends a trace adds the trace to a list for its hash tag, with its size as `MEMORY USAGE` reports it and
with the time at which its keys expire. Scripts that end later traces remove expired ones from the list. The list only
decides the order of dropping. A script drops a trace only if its final event is there, so a wrong clock never drops a
running trace.

Each list lies in the slot of its tag, as Redis Cluster requires. The bounds count the sum over all tags. The caller
names the traces to drop, so two adapters that drop at the same time drop the same traces.
"""

from __future__ import annotations

import heapq
import logging
from typing import Any, Final

from tracewire_bus.transport.errors import BusError, NotAllowed
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.scripts import Script

from .keys import Keys

__all__ = ["Finished"]

logger = logging.getLogger("tracewire")

#: How many of the oldest traces of each tag one round fetches, at least and at most.
_MIN_PAGE, _MAX_PAGE = 4, 200

_LIST: Final = Script("finished_list")
_DROP: Final = Script("finished_drop")


class Finished:
    """The finished traces of one bus."""

    def __init__(self, connections: Connections, keys: Keys) -> None:
        self._connections = connections
        self._keys = keys

    async def check(self) -> None:
        """Check that Redis allows `MEMORY USAGE`, which a bound on bytes needs.

        Raises:
            BusError: Redis does not allow the command.
            BusUnavailable: Redis does not answer.
        """
        try:
            await self._connections.command("MEMORY", "USAGE", self._keys.ended(self._keys.tags[0]))
        except NotAllowed as error:
            raise BusError(
                f"a bound on the bytes of finished traces needs the command MEMORY USAGE: {error}"
            ) from error

    async def acquire_turn(self, who: str, milliseconds: int) -> bool:
        """Acquire the turn to apply the bounds, which one process gets in `milliseconds`. Returns whether `who` got it.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        reply = await self._connections.command("SET", self._keys.ended_turn(), who, "PX", milliseconds, "NX")
        return reply is not None

    async def total(self) -> tuple[int, int]:
        """The number of finished traces, and their size in bytes as Redis reported it when each trace ended.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        counts = await self._list(0)
        return sum(found[0] for found in counts), sum(found[1] for found in counts)

    async def drop_beyond(self, traces: int, nbytes: int) -> int:
        """Drop the oldest traces until at most `traces` remain, of at most `nbytes` bytes; 0 stands for no bound.

        The oldest traces are those that expire first. Returns the number of dropped traces.

        Raises:
            BusError: Redis refuses.
            BusUnavailable: Redis does not answer; some traces may have been dropped.
        """
        dropped = 0
        while True:
            count, size = await self.total()
            if not _beyond(count, size, traces, nbytes):
                return dropped
            over = max(count - traces if traces else 0, 1)
            some = await self._drop_some(
                traces, nbytes, min(_MAX_PAGE, max(_MIN_PAGE, 2 * over // len(self._keys.tags)))
            )
            dropped += some
            if not some:
                # Another adapter drops them at the same time.
                return dropped

    async def _list(self, oldest: int) -> list[list[Any]]:
        """For each tag: the number of traces, their bytes, then expiry time, size and id of the `oldest` first ones."""
        keys = self._keys
        return await self._connections.commands(
            *(_LIST((keys.ended(tag), keys.ended_bytes(tag)), oldest) for tag in keys.tags)
        )

    async def _drop_some(self, traces: int, nbytes: int, page: int) -> int:
        """Drop the oldest traces beyond the bounds, until the `page` oldest of one tag are all dropped."""
        keys, tags = self._keys, self._keys.tags
        lists = await self._list(page)
        count, size = (sum(found[place] for found in lists) for place in (0, 1))
        oldest = [
            [(found[at], place, found[at + 1], found[at + 2]) for at in range(2, len(found), 3)]
            for place, found in enumerate(lists)
        ]
        chosen: dict[str, list[bytes]] = {}
        for _, place, takes, trace in heapq.merge(*oldest):
            if not _beyond(count, size, traces, nbytes):
                break
            names = chosen.setdefault(tags[place], [])
            names.append(trace)
            count, size = count - 1, size - takes
            if len(names) == len(oldest[place]) < lists[place][0]:
                # The list of this tag goes on beyond `page`.
                break
        if not chosen:
            return 0
        replies = await self._connections.commands(
            *(
                _DROP(
                    (keys.ended(tag), keys.ended_bytes(tag), keys.control(tag, "")),
                    *(f"{keys.prefix}:{{{tag}}}:", *names),
                )
                for tag, names in chosen.items()
            )
        )
        return sum(replies)


def _beyond(count: int, size: int, traces: int, nbytes: int) -> bool:
    return 0 < traces < count or 0 < nbytes < size
