"""Brings rows from a GPU to the memory that hosts share, without a wait of the model.

At a location, each tensor is copied to pinned memory once, for all traces that want rows of it. The copies run while
the model goes on. When a turn is sent, the trace's rows are copied on to the memory that its host shares.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tracewire_engine.link.shared_rows import RowMemory
from tracewire_engine.worker.host_copy import PinnedCopy

__all__ = ["LateCopies", "LateRows"]


class _Whole:
    """A tensor's bytes on their way to the host, until all traces that want some have taken them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = PinnedCopy(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        self._users = 0
        self._lock = threading.Lock()

    def use(self) -> None:
        with self._lock:
            self._users += 1

    @property
    def done(self) -> bool:
        return self._copy.done

    def lend(self) -> memoryview:
        return self._copy.lend()

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            last = not self._users
        if last:
            self._copy.release()


class LateRows(NamedTuple):
    """Rows that are on their way: pieces of a tensor's bytes (first byte, size), and where they go."""

    whole: _Whole
    pieces: Sequence[tuple[int, int]]
    start: int

    @property
    def done(self) -> bool:
        """Whether `arrive` does not wait."""
        return self.whole.done

    def arrive(self, memory: RowMemory) -> None:
        """Copy the rows to `memory`. Waits for the copy from the GPU."""
        held, start = self.whole.lend(), self.start
        for first, size in self.pieces:
            memory.put(held[first : first + size], start)
            start += size
        del held
        self.whole.leave()

    def drop(self) -> None:
        """Give up the rows."""
        self.whole.leave()


class LateCopies:
    """The copies of one location's tensors."""

    def __init__(self) -> None:
        self._made: dict[int, _Whole] = {}

    def rows(self, tensor: torch.Tensor, place: tuple[int, list[tuple[int, int]]] | None, start: int) -> LateRows:
        """Rows of a tensor on their way.

        Args:
            tensor: at the location.
            place: the axis of the rows, and their spans; `None` for the whole tensor.
            start: where they go in the shared memory.
        """
        whole = self._made.get(id(tensor))
        if whole is None:
            whole = self._made[id(tensor)] = _Whole(tensor)
        whole.use()
        if place is None:
            return LateRows(whole, [(0, tensor.nbytes)], start)
        axis, spans = place
        # Nothing but axes of one item lies before the axis.
        row = tensor.nbytes // tensor.shape[axis]
        return LateRows(whole, [(first * row, size * row) for first, size in spans], start)
