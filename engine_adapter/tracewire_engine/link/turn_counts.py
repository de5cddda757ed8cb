"""How many messages of saves each host may have sent: numbers in memory that a worker shares with its save relay."""

from __future__ import annotations

import mmap
import os
from typing import Final

__all__ = ["TurnCounts"]


class TurnCounts:
    """The numbers, by the hosts' numbers. The worker writes them, and the relay reads them.

    Args:
        descriptor: of the memory. Stays open until `close`.
    """

    #: How many hosts there may be at a time. Their numbers differ modulo this.
    places: Final = 1 << 16

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._numbers = memoryview(mmap.mmap(descriptor, 8 * self.places)).cast("Q")

    @classmethod
    def create(cls) -> TurnCounts:
        """Make the memory. It takes room as it is used."""
        descriptor = os.memfd_create("tracewire-turns", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, 8 * cls.places)
        return cls(descriptor)

    def __getitem__(self, host: int) -> int:
        return self._numbers[host % self.places]

    def __setitem__(self, host: int, turns: int) -> None:
        self._numbers[host % self.places] = turns

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
