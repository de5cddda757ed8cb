"""Shared memory between the reporting worker and its adapters: a ring buffer for the reads of declared interventions.

The bytes of a large step go into the buffer, and the link's message gives their place. A GPU copies them there itself.
That saves the model's thread two copies a step, and the adapter three. The worker makes the buffer, an anonymous file
in memory, sends the adapters its path, and uses it after all of them have opened it. The steps lie in the buffer one
after the other. Each adapter releases the steps that it reads in that order. The worker reuses the room of a step when
all adapters that read it have released it. If an adapter is behind and the buffer is full, the bytes go into the
message. If a step takes more than half of the buffer, the worker makes a larger one in its place.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import re
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Self

from tracewire_engine.protocol.messages import Batch, Place

if TYPE_CHECKING:
    import torch


__all__ = ["LEAST_BYTES", "RingBuffer", "RingCopy", "RingReader", "ring_bytes"]

logger = logging.getLogger("vllm.tracewire")

#: Size of the buffer, in bytes, and of the largest one that takes its place.
RING_BYTES: Final = 64 << 20
MOST_RING_BYTES: Final = 1 << 30
#: A step with fewer bytes goes in the message.
LEAST_BYTES: Final = 8 << 10
#: Size of the header, in bytes: two 64-bit numbers for each adapter, whether it has the buffer open, and how far it has
#: taken it.
_HEADER: Final = 4096
_OPENED, _TAKEN = 0, 1
#: Each step begins at a multiple of this many bytes.
_ALIGNMENT: Final = 256
#: Linux's constants by number, since not every Python names them. The seals: no more seals, no shrinking, no growing.
_ADD_SEALS, _GET_SEALS, _SEALS = 1033, 1034, 1 | 2 | 4
_NAME: Final = re.compile(r"/proc/[0-9]+/fd/[0-9]+")


def ring_bytes(nbytes: int) -> int:
    """The size of a buffer for steps of so many bytes: some of them have room in it."""
    return min(max(RING_BYTES, 1 << (4 * nbytes - 1).bit_length()), MOST_RING_BYTES)


class RingBuffer:
    """The worker's end of the buffer. Only one thread may use it."""

    def __init__(self, size: int = RING_BYTES, readers: int = 1) -> None:
        """Make a buffer of `size` bytes for `readers` adapters.

        Raises:
            OSError: the system has no shared memory, or too little.
        """
        import torch

        self._descriptor = os.memfd_create("tracewire-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, _HEADER + size)
            # No process can shrink the file while the adapter reads it.
            fcntl.fcntl(self._descriptor, _ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self._descriptor, _HEADER + size)
        except BaseException:
            os.close(self._descriptor)
            raise
        #: The path by which the adapter opens the buffer.
        self.name = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self._counts = memoryview(self._map)[: 16 * readers].cast("Q")
        self._all = range(readers)
        #: The steps whose room is not free yet, the earliest first: where each ends, and which adapters read it.
        self._held: deque[tuple[int, Collection[int]]] = deque()
        self._open = False
        #: Up to where the room of steps is free.
        self._free = 0
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8, offset=_HEADER)
        self._size = size
        self._put = 0
        #: Whether the memory is pinned, so that a GPU can copy into it; `None` before the first tensor of a GPU.
        self._pinned: bool | None = None
        self._events: list[Any] = []

    @property
    def is_open(self) -> bool:
        """Whether all adapters have the buffer open."""
        return self._opened()

    def is_small(self, nbytes: int) -> bool:
        """Whether a larger buffer is better for steps of so many bytes: few of them have room in this one."""
        return self._opened() and nbytes > self._size // 2 and self._size < MOST_RING_BYTES

    def close(self) -> None:
        """Give the memory back, when no copy into it is under way. Adapters that have it open keep it."""
        if self._pinned:
            import torch

            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        self._counts.release()
        # The map goes with the last of the tensors in it.
        del self._bytes, self._map
        os.close(self._descriptor)

    def put(self, tensor: torch.Tensor, readers: Collection[int] = (0,)) -> RingCopy | None:
        """Begin to copy a tensor of bytes, which the adapters `readers` read.

        Returns `None` if it is small, or if the buffer is not open or has no room.
        """
        size = tensor.nbytes
        if size < LEAST_BYTES or not self._opened():
            return None
        if tensor.is_cuda and not self.pin():
            return None
        start = self._put % self._size
        skipped = self._size - start if start + size > self._size else 0
        end = self._put + skipped + -(-size // _ALIGNMENT) * _ALIGNMENT
        taken = self._taken()
        # If the adapters have taken everything, the skipped end is free, too.
        if end - (taken + skipped if taken == self._put else taken) > self._size:
            return None
        self._put = end
        self._held.append((end, readers))
        start = 0 if skipped else start
        room, event = self._bytes[start : start + size], None
        room.copy_(tensor, non_blocking=True)
        if tensor.is_cuda:
            from .cuda_events import recorded

            event = recorded(self._events, tensor.device)
        return RingCopy(Place(start, size, end), event, self._events)

    def _opened(self) -> bool:
        """Whether all adapters have the buffer open."""
        self._open = self._open or all(self._counts[2 * reader + _OPENED] for reader in self._all)
        return self._open

    def _taken(self) -> int:
        """Up to where all adapters have taken the steps that they read."""
        held, counts = self._held, self._counts
        while held and all(counts[2 * reader + _TAKEN] >= held[0][0] for reader in held[0][1]):
            self._free = held.popleft()[0]
        return self._free

    def pin(self) -> bool:
        """Pin the memory, so that a GPU can copy into it. Returns whether it is pinned."""
        if self._pinned is None:
            import torch

            try:
                error: Any = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self._size, 0)
                self._pinned = int(error) == 0
            except Exception as exception:  # for example, a torch build for other devices
                error, self._pinned = exception, False
            if not self._pinned:
                # CUDA keeps the error, and PyTorch would raise it at the next kernel.
                with suppress(Exception):
                    torch.empty(1, device="cuda").fill_(0)
                logger.warning(
                    "shared memory cannot be pinned (%s): the link's messages carry the reads of interventions", error
                )
        return self._pinned


class RingCopy:
    """A copy of a tensor of bytes into the ring buffer, which may be under way."""

    __slots__ = ("_copied", "_events", "_place")

    def __init__(self, place: Place, copied: Any, events: list[Any]) -> None:
        self._place, self._copied, self._events = place, copied, events

    @property
    def done(self) -> bool:
        """Whether the copy has ended."""
        return self._copied is None or self._copied.query()

    def fill(self, batch: Batch) -> None:
        """Wait for the copy, and set the place of the bytes in `batch`."""
        if self._copied is not None:
            self._copied.synchronize()
        batch.place = self._place

    def release(self) -> None:
        """Make the CUDA event of the copy available to the next one."""
        if self._copied is not None:
            self._events.append(self._copied)
            self._copied = None


class RingReader:
    """An adapter's end of the buffer."""

    def __init__(self, name: str, reader: int = 0) -> None:
        """Open the buffer that a worker has made, by its path `name`, as the adapter number `reader`.

        Raises:
            OSError: the file cannot be opened.
            ValueError: the path is not one of a worker's buffer, or the file could shrink.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"not the path of a worker's shared memory: {name!r}")
        descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        try:
            if fcntl.fcntl(descriptor, _GET_SEALS) & _SEALS != _SEALS:
                raise ValueError(f"{name} could be truncated while the adapter reads it")
            self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
        self._bytes = memoryview(self._map).toreadonly()
        self._counts = memoryview(self._map)[16 * reader : 16 * reader + 16].cast("Q")
        self._counts[_OPENED] = 1

    def view(self, place: Place) -> memoryview:
        """The bytes at a place, valid until `release`.

        Raises:
            ValueError: the place lies outside the buffer.
        """
        start = _HEADER + place.start
        if not 0 <= place.start <= place.start + place.size <= len(self._map) - _HEADER:
            raise ValueError(f"outside the shared memory: {place}")
        return self._bytes[start : start + place.size]

    def release(self, place: Place) -> None:
        """Let the worker reuse a place and all before it."""
        self._counts[_TAKEN] = place.end

    def close(self) -> None:
        """Unmap the buffer. If views of it are left, the system unmaps it when the last of them is gone."""
        self._counts.release()
        self._bytes.release()
        with suppress(BufferError):
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
