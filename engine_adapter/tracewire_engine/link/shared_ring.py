"""Shared memory between the worker that reports and its adapter: a ring buffer for what declared interventions read.

Of a large step, a message of the link has only where its bytes lie; a GPU copies them there itself. That spares the
model's thread two copies a step, and the adapter as many. The worker makes the memory, a file without a name, and
tells the adapter of it; only when the adapter has it open does the worker use it. Bytes lie one after the other and are
taken in that order. Where there is no room, since the adapter is behind, they go in the message.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Self

from tracewire_engine.protocol.messages import Batch, Place

if TYPE_CHECKING:
    import torch


__all__ = ["LEAST_BYTES", "RingBuffer", "RingCopy", "RingReader"]

logger = logging.getLogger("vllm.tracewire")

#: How many bytes it holds.
RING_BYTES: Final = 16 << 20
#: Fewer bytes than these go in the message.
LEAST_BYTES: Final = 8 << 10
#: Before the bytes: whether the adapter has it open, and how far it has taken what was put in, each 64 bits wide.
_HEADER: Final = 4096
_OPENED, _TAKEN = 0, 1
#: Where bytes begin is a multiple of this.
_ALIGNMENT: Final = 256
#: Linux's, by their numbers: not every Python knows their names. No more seals, nothing cut off, nothing added.
_ADD_SEALS, _GET_SEALS, _SEALS = 1033, 1034, 1 | 2 | 4
_NAME: Final = re.compile(r"/proc/[0-9]+/fd/[0-9]+")


class RingBuffer:
    """The worker's end. For one thread."""

    def __init__(self, size: int = RING_BYTES) -> None:
        """Make it.

        Raises:
            OSError: there is no memory for it, or not of this kind.
        """
        import torch

        self._descriptor = os.memfd_create("tracewire-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, _HEADER + size)
            # Nobody can take away what the adapter reads.
            fcntl.fcntl(self._descriptor, _ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self._descriptor, _HEADER + size)
        except BaseException:
            os.close(self._descriptor)
            raise
        #: Where the adapter opens it.
        self.name = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self._counts = memoryview(self._map)[:16].cast("Q")
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8, offset=_HEADER)
        self._size = size
        self._put = 0
        #: Whether a GPU copies into it by itself; unknown before the first time.
        self._pinned: bool | None = None
        self._events: list[Any] = []

    def put(self, tensor: torch.Tensor) -> RingCopy | None:
        """Begin to copy a tensor of bytes, or return nothing: it is small, nobody has it open, or it has no room."""
        size = tensor.nbytes
        if size < LEAST_BYTES or not self._counts[_OPENED]:
            return None
        if tensor.is_cuda and not self._pin():
            return None
        start = self._put % self._size
        skipped = self._size - start if start + size > self._size else 0
        end = self._put + skipped + -(-size // _ALIGNMENT) * _ALIGNMENT
        taken = self._counts[_TAKEN]
        # Where nothing is left to take, nor is what is skipped.
        if end - (taken + skipped if taken == self._put else taken) > self._size:
            return None
        self._put = end
        start = 0 if skipped else start
        room, event = self._bytes[start : start + size], None
        room.copy_(tensor, non_blocking=True)
        if tensor.is_cuda:
            import torch

            event = self._events.pop() if self._events else torch.cuda.Event()
            event.record()
        return RingCopy(Place(start, size, end), event, self._events)

    def _pin(self) -> bool:
        if self._pinned is None:
            import torch

            try:
                error: Any = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self._size, 0)
                self._pinned = int(error) == 0
            except Exception as exception:  # of a build for other devices, say
                error, self._pinned = exception, False
            if not self._pinned:
                # CUDA remembers the error, and PyTorch would find it at the next kernel.
                with suppress(Exception):
                    torch.empty(1, device="cuda").fill_(0)
                logger.warning("what is read goes in messages: shared memory cannot be pinned (%s)", error)
        return self._pinned


class RingCopy:
    """A copy of a tensor of bytes into the ring buffer, perhaps under way."""

    __slots__ = ("_copied", "_events", "_place")

    def __init__(self, place: Place, copied: Any, events: list[Any]) -> None:
        self._place, self._copied, self._events = place, copied, events

    @property
    def done(self) -> bool:
        """Whether the bytes are there."""
        return self._copied is None or self._copied.query()

    def fill(self, batch: Batch) -> None:
        """Say in `batch` where they are; waits for them."""
        if self._copied is not None:
            self._copied.synchronize()
        batch.place = self._place

    def release(self) -> None:
        """It was said."""
        if self._copied is not None:
            self._events.append(self._copied)
            self._copied = None


class RingReader:
    """The adapter's end."""

    def __init__(self, name: str) -> None:
        """Open what the worker has made.

        Raises:
            OSError: it cannot be opened.
            ValueError: it is none of these.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"no shared memory of a worker's: {name!r}")
        descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        try:
            if fcntl.fcntl(descriptor, _GET_SEALS) & _SEALS != _SEALS:
                raise ValueError(f"{name} could be cut off while it is read")
            self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
        self._counts = memoryview(self._map)[:16].cast("Q")
        self._counts[_OPENED] = 1

    def take(self, place: Place) -> memoryview:
        """The bytes at a place, which is free from now on. Places are taken in the order of the messages.

        Raises:
            ValueError: there is no such place.
        """
        start = _HEADER + place.start
        if not 0 <= place.start <= place.start + place.size <= len(self._map) - _HEADER:
            raise ValueError(f"no place in the shared memory: {place}")
        data = self._map[start : start + place.size]
        self._counts[_TAKEN] = place.end
        return memoryview(data)

    def close(self) -> None:
        """Let go of it."""
        self._counts.release()
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
