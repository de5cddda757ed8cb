"""Host memory for rows on their way between the model and the hosts of blocks, pinned if the model is on a GPU."""

from __future__ import annotations

import threading
from typing import ClassVar

import torch

__all__ = ["MOST_KEPT", "RowBuffer"]

#: The smallest buffer for values, and the largest that is kept for later steps, in bytes.
_LEAST, MOST_KEPT = 1 << 20, 64 << 20

#: How many views of its memory a buffer keeps for later steps.
_VIEWS = 1024


class RowBuffer:
    """Host memory, pinned if there is a GPU."""

    _free: ClassVar[dict[tuple[int, bool], list[RowBuffer]]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, size: int, *, pinned: bool) -> None:
        self.size, self.pinned = size, pinned
        # A tensor or view that is made in inference mode cannot be written outside it, where earlier stages' rows come.
        with torch.inference_mode(False):
            self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        #: The same memory.
        self.array = self._bytes.numpy()
        self._views: dict[tuple[int, torch.dtype, torch.Size], torch.Tensor] = {}

    @classmethod
    def take(cls, size: int, *, pinned: bool) -> RowBuffer:
        """A buffer of at least `size` bytes."""
        size = max(_LEAST, 1 << (size - 1).bit_length())
        with cls._lock:
            free = cls._free.get((size, pinned))
            if free:
                return free.pop()
        return cls(size, pinned=pinned)

    def give_back(self) -> None:
        """Keep it for later steps."""
        if self.size <= MOST_KEPT:
            with self._lock:
                self._free.setdefault((self.size, self.pinned), []).append(self)

    def tensor(self, dtype: torch.dtype, shape: torch.Size, start: int = 0) -> torch.Tensor:
        """The tensor whose elements lie at byte `start` and on."""
        key = start, dtype, shape
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            size = shape.numel() * dtype.itemsize
            with torch.inference_mode(False):
                view = self._views[key] = self._bytes[start : start + size].view(dtype).view(shape)
        return view

    def copy(self, tensor: torch.Tensor, start: int) -> None:
        """Copy a tensor's elements to byte `start` and on. On a GPU, begin to."""
        self.tensor(tensor.dtype, tensor.shape, start).copy_(tensor, non_blocking=True)
