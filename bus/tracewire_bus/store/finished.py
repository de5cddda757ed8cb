"""Finished traces, all of them: how many are kept, and how many bytes they take.

What is kept of a finished trace is its stream, its record, its snapshot and its blobs. Each goes by itself when its
time is over (`retention_s`). A bound over all finished traces drops the oldest sooner
(`Finished.keep`).

The script that ends a trace also enters it in its hash tag's list, with what it takes by Redis's own account (`MEMORY
USAGE`) and the time, by Redis's clock, at which it would go by itself; traces that end are let out of the list again
when that has passed. The list orders what is dropped and nothing else: only what has its final is ever dropped, so
that a clock that is wrong drops an older or a younger trace, and none that runs.

A list lies in its tag's slot, so that all of this works on Redis Cluster. The bound is compared with the sum over the
tags. Whoever drops names what is to go: two who do it at once, and see the same, drop the same.
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

#: How many candidates of each tag one look takes at least and at most.
_LEAST, _MOST = 4, 200

_LOOK: Final = Script("finished_list")
_DROP: Final = Script("finished_drop")


class Finished:
    """The finished traces of one bus."""

    def __init__(self, connections: Connections, keys: Keys) -> None:
        self._connections = connections
        self._keys = keys

    async def check(self) -> None:
        """Make sure that Redis says what keys take, without which no bound on bytes holds.

        Raises:
            BusError: it does not.
            BusUnavailable: it stayed away.
        """
        try:
            await self._connections.command("MEMORY", "USAGE", self._keys.ended(self._keys.tags[0]))
        except NotAllowed as error:
            raise BusError(
                f"a bound on the bytes of finished traces takes the command MEMORY USAGE: {error}"
            ) from error

    async def turn(self, who: str, milliseconds: int) -> bool:
        """Whether it is this one's turn to look after them: once in this time it is somebody's.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        reply = await self._connections.command("SET", self._keys.ended_turn(), who, "PX", milliseconds, "NX")
        return reply is not None

    async def total(self) -> tuple[int, int]:
        """How many there are, and how many bytes they take, by Redis's account at the end of each.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        counts = await self._look(0)
        return sum(found[0] for found in counts), sum(found[1] for found in counts)

    async def keep(self, traces: int, nbytes: int) -> int:
        """Drop the oldest until there are no more than so many, and they take no more bytes than that (0: any number).

        The oldest are those whose time would be over first. Returns how many were dropped.

        Raises:
            BusError: Redis refuses.
            BusUnavailable: it stayed away; some may have been dropped.
        """
        dropped = 0
        while True:
            count, size = await self.total()
            if not _beyond(count, size, traces, nbytes):
                return dropped
            over = max(count - traces if traces else 0, 1)
            some = await self._drop_some(traces, nbytes, min(_MOST, max(_LEAST, 2 * over // len(self._keys.tags))))
            dropped += some
            if not some:
                # Others were at it.
                return dropped

    async def _look(self, oldest: int) -> list[list[Any]]:
        keys = self._keys
        return await self._connections.commands(
            *(_LOOK((keys.ended(tag), keys.ended_bytes(tag)), oldest) for tag in keys.tags)
        )

    async def _drop_some(self, traces: int, nbytes: int, page: int) -> int:
        """Drop the oldest that are beyond the bounds, up to where one tag's oldest `page` are all gone."""
        keys, tags = self._keys, self._keys.tags
        looks = await self._look(page)
        count, size = (sum(found[place] for found in looks) for place in (0, 1))
        oldest = [
            [(found[at], place, found[at + 1], found[at + 2]) for at in range(2, len(found), 3)]
            for place, found in enumerate(looks)
        ]
        chosen: dict[str, list[bytes]] = {}
        for _, place, takes, trace in heapq.merge(*oldest):
            if not _beyond(count, size, traces, nbytes):
                break
            names = chosen.setdefault(tags[place], [])
            names.append(trace)
            count, size = count - 1, size - takes
            if len(names) == len(oldest[place]) < looks[place][0]:
                # The next one of this tag is not known here.
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
