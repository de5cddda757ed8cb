"""A file that several running traces use, on the adapter's machine and on those of its remote workers."""

from __future__ import annotations

from pathlib import Path

import anyio

from .engine_api import Carrier

__all__ = ["SharedFile"]

#: How long to wait for the workers to drop a file, in seconds. A file that they keep only costs memory.
DROP_S = 10.0


class SharedFile:
    """One file. A `carrier` also sends it to workers on other machines.

    Attributes:
        users: how many traces use it.
        turn: held by the trace that fetches it.
    """

    def __init__(self, path: Path, carrier: Carrier | None) -> None:
        self.path = path
        self.users = 0
        self.turn = anyio.Lock()
        self._carrier = carrier
        #: Whether the adapter has begun to send the file to remote workers, and whether they have all of it.
        self._begun = False
        self._carried = False

    @property
    def is_everywhere(self) -> bool:
        """Whether the remote workers have all of it, if there are any."""
        return self._carrier is None or self._carried

    async def carry(self) -> None:
        """Send the whole file to the remote workers, unless they have it."""
        if self._carrier is None or self._carried:
            return
        self._begun = True
        await self._carrier.carry(self.path)
        # Not earlier: a request that waits for the file would use an incomplete one.
        self._carried = True

    def unlink(self) -> None:
        """Remove the file here. Memory that workers have mapped stays mapped."""
        self.path.unlink(missing_ok=True)

    async def drop(self) -> None:
        """Have the remote workers remove it. By then another trace may have made a file at the same path."""
        if self._carrier is not None and self._begun:
            # An engine that hangs must not keep its adapter from exiting.
            with anyio.move_on_after(DROP_S, shield=True):
                await self._carrier.drop(self.path)
