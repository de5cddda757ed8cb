"""Memory through which large messages of a channel go. Two processes share it, and one of them writes into it.

A socket's kernel takes a large message in pieces. Each piece takes two copies, and wakes the reader once more.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .memory import copy_bytes
from .shared_rows import RowMemory, SharedValueError

__all__ = ["MessageMemory", "Placed"]

#: The last bytes of the memory: a 64-bit number, in which the reader says how many bytes it needs no longer.
_COUNTED = 64

_MOST = 1 << 62


class Placed(NamedTuple):
    """Where a message lies: its first byte, its size, and how many bytes were given out with it in all."""

    start: int
    size: int
    taken: int


class MessageMemory(RowMemory):
    """The memory, for either process."""

    def __init__(self, descriptor: int, size: int) -> None:
        super().__init__(descriptor, size)
        self.size -= _COUNTED
        self._counted = memoryview(self._map)[self.size :].cast("Q")

    def place(self, message: bytes) -> Placed | None:
        """Write a message. Returns `None` if there is no room before the reader has taken others."""
        self.returned = max(self.returned, min(self._counted[0], self.taken))
        start = self.room(len(message))
        if start is None:
            return None
        self.put(memoryview(message), start)
        return Placed(start, len(message), self.taken)

    def take(self, placed: Placed) -> memoryview:
        """Copy a message out of the memory, and let the writer use its room again.

        Raises:
            SharedValueError: it does not lie in the memory, or behind those that were taken before.
        """
        start, size, taken = placed
        if not 0 <= start <= start + size <= self.size or not self.taken + size <= taken < _MOST:
            raise SharedValueError(f"a message lies outside the shared memory: {placed!r}"[:200])
        found = np.empty(size, np.uint8)
        copy_bytes(found.ctypes.data, self._address + start, size)
        self.taken = self._counted[0] = taken
        return found.data
