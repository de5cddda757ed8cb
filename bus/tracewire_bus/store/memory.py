"""How much memory Redis has left, and what Redis does when none is left."""

from __future__ import annotations

import logging
from typing import Final

from tracewire_bus.transport.errors import BusError, BusFull, BusUnavailable
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.tasks import Refreshed

__all__ = ["Memory"]

logger = logging.getLogger("tracewire")

#: Which part of its memory a Redis must have left for new submissions: running traces need it more.
RESERVE: float = 0.05
#: How old the figure may be when a trace is submitted, in seconds.
_AGE_S: Final = 1.0


class Memory:
    """The memory of the Redis of a bus."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._left = Refreshed(self._ask)

    async def prefetch(self) -> None:
        """Ask ahead what a submission asks first."""
        await self._left.get(_AGE_S)

    async def check_reserve(self) -> None:
        """Make sure that Redis takes new submissions.

        Raises:
            BusFull: Redis has less than the reserve left.
            BusUnavailable: Redis does not answer.
        """
        left = await self._left.get(_AGE_S)
        if left is not None and left < RESERVE:
            raise BusFull(f"Redis has {100 * left:.2g} % of its memory left, and keeps that for traces that run")

    async def _ask(self) -> float | None:
        """Which part Redis has left; None if it has no limit, or does not say."""
        try:
            limit, used, _ = await self.usage()
        except BusUnavailable:
            raise
        except BusError as error:
            logger.debug("Redis does not say how much memory it has: %s", error)
            return None
        return max(0.0, 1 - used / limit) if limit else None

    async def usage(self) -> tuple[int, int, str]:
        """Redis's limit in bytes (0: none), the bytes that it uses, and its eviction policy.

        Raises:
            BusError: Redis does not say.
            BusUnavailable: Redis does not answer.
        """
        raw = await self._connections.command("INFO", "memory")
        lines = (line.partition(":") for line in bytes(raw).decode("utf-8", "replace").splitlines())
        values = {name: value for name, _, value in lines}
        return int(values.get("maxmemory", 0)), int(values.get("used_memory", 0)), values.get("maxmemory_policy", "")

    async def refuse_eviction(self) -> None:
        """Make sure that Redis never evicts what it holds.

        Raises:
            BusError: Redis evicts keys when it has no memory left.
            BusUnavailable: Redis does not answer.
        """
        try:
            limit, _, policy = await self.usage()
        except BusUnavailable:
            raise
        except BusError as error:
            logger.warning("Redis does not say what it does when its memory is full: %s", error)
            return
        if limit and policy != "noeviction":
            raise BusError(
                f"this Redis evicts keys when its memory of {limit} bytes is full (maxmemory-policy {policy}), and so "
                "would lose events and submissions: set maxmemory-policy to noeviction"
            )
