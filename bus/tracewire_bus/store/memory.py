"""The memory of Redis: how much is left for submissions, and whether Redis evicts keys when none is left."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Final

from tracewire_bus.transport.errors import BusError, BusFull, BusUnavailable
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.tasks import Refreshed

__all__ = ["Memory"]

logger = logging.getLogger("tracewire")

#: Fraction of its memory that Redis must have left to take a submission. The rest is kept for running traces.
RESERVE: float = 0.05
#: How old the figure may be that a submission is checked with, in seconds.
_AGE_S: Final = 1.0


class Memory:
    """The memory of the Redis of a bus."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._left = Refreshed(self._ask)

    async def prefetch(self) -> None:
        """Fetch the figure that the next submission needs, so that the submission itself need not wait for it.

        If this fails, the submission fetches it.
        """
        with suppress(BusError):
            await self._left.get(_AGE_S)

    async def check_reserve(self) -> None:
        """Check that Redis has enough memory left for a new submission.

        Raises:
            BusFull: Redis has less than the reserve left.
            BusUnavailable: Redis does not answer.
        """
        left = await self._left.get(_AGE_S)
        if left is not None and left < RESERVE:
            raise BusFull(f"Redis has {100 * left:.2g} % of its memory left, which is kept for running traces")

    async def _ask(self) -> float | None:
        """Fraction of its memory that Redis has left; None if it has no limit, or refuses to report it."""
        try:
            limit, used, _ = await self.usage()
        except BusUnavailable:
            raise
        except BusError as error:
            logger.debug("Redis does not report its memory: %s", error)
            return None
        return max(0.0, 1 - used / limit) if limit else None

    async def usage(self) -> tuple[int, int, str]:
        """Redis's limit in bytes (0: none), the bytes that it uses, and its eviction policy.

        Raises:
            BusError: Redis refuses the command.
            BusUnavailable: Redis does not answer.
        """
        raw = await self._connections.command("INFO", "memory")
        lines = (line.partition(":") for line in bytes(raw).decode("utf-8", "replace").splitlines())
        values = {name: value for name, _, value in lines}
        return int(values.get("maxmemory", 0)), int(values.get("used_memory", 0)), values.get("maxmemory_policy", "")

    async def refuse_eviction(self) -> None:
        """Check that Redis does not evict keys.

        Raises:
            BusError: Redis evicts keys when it has no memory left.
            BusUnavailable: Redis does not answer.
        """
        try:
            limit, _, policy = await self.usage()
        except BusUnavailable:
            raise
        except BusError as error:
            logger.warning("Redis does not report whether it evicts keys when its memory is full: %s", error)
            return
        if limit and policy != "noeviction":
            raise BusError(
                f"this Redis evicts keys when its memory of {limit} bytes is full (maxmemory-policy {policy}), and "
                "would lose events and submissions: set maxmemory-policy to noeviction"
            )
