"""A file that several running traces use, on the adapter's machine and on those of its remote workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import anyio

from .engine_api import Carrier

__all__ = ["SharedFile", "written_whole"]

#: How long to wait for the workers to drop a file, in seconds. A file that they keep only costs memory.
DROP_S = 10.0


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file for writing that is at `path`, with all that was written, when the context is left without an error.

    A worker looks into the folders of all adapters of its engine, so it could read a file that another adapter writes.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
            yield out
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


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
        """Have the remote workers remove what they have at its path."""
        if self._carrier is not None and self._begun:
            # An engine that hangs must not keep its adapter from exiting.
            with anyio.move_on_after(DROP_S, shield=True):
                await self._carrier.drop(self.path)
