"""Numbers in memory by which a stream of a GPU says how far it is, and by which it is made to wait.

The stream writes and reads them itself. So neither side calls the driver while it waits for the other: a driver that
loads a kernel may wait for the stream, and whoever calls it then waits, too.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Protocol

import torch

from tracewire_engine.link.cuda_events import current_stream

__all__ = ["CudaFlags", "StreamFlags", "ThreadFlags"]

_ARRIVED, _RELEASED, _PASSED, _EXPIRED, _COUNT = range(5)


class StreamFlags(Protocol):
    """What a stream and a thread tell each other. Numbers only grow, and each is used for one wait."""

    def arrive(self, number: int) -> None:
        """Have the stream note that it has come here."""

    def hold(self, number: int) -> None:
        """Have the stream wait here until this number is released, or for as long as it may wait."""

    def go_on(self, number: int) -> None:
        """Have the stream note that it has passed this point."""

    def has_arrived(self, number: int) -> bool:
        """Whether the stream has come to `arrive`."""

    def release(self, number: int) -> None:
        """Let the stream pass `hold`."""

    def has_passed(self, number: int) -> bool:
        """Whether the stream has come to `go_on`."""

    def expired(self, number: int) -> bool:
        """Whether the stream has passed a `hold` without its release: this one, if it has passed none behind it."""

    def expired_last(self, number: int) -> bool:
        """Whether this `hold` is the last one that the stream has passed without its release."""


class CudaFlags:
    """Flags of the current stream of a CUDA device.

    Args:
        limit_s: how long the stream waits at most, in seconds.

    Raises:
        OSError: the driver cannot do this.
    """

    def __init__(self, limit_s: float) -> None:
        # Triton is there only with a GPU.
        from .hold_kernel import hold

        self._hold, self._limit_ns = hold, int(limit_s * 1e9)
        self._write = ctypes.CDLL("libcuda.so.1").cuStreamWriteValue64_v2
        self._write.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint]
        self._memory = torch.zeros(_COUNT, dtype=torch.int64, pin_memory=True)
        self._array, self._address = self._memory.numpy(), self._memory.data_ptr()
        self.hold(0)
        self.go_on(0)
        current_stream().synchronize()

    def arrive(self, number: int) -> None:
        self._put(_ARRIVED, number)

    def hold(self, number: int) -> None:
        self._hold(self._memory, number, self._limit_ns)

    def go_on(self, number: int) -> None:
        self._put(_PASSED, number)

    def _put(self, place: int, number: int) -> None:
        error = self._write(current_stream().cuda_stream, self._address + 8 * place, number, 0)
        if error:
            raise OSError(f"cuStreamWriteValue64 returned {error}")

    def has_arrived(self, number: int) -> bool:
        return bool(self._array[_ARRIVED] >= number)

    def release(self, number: int) -> None:
        self._array[_RELEASED] = number

    def has_passed(self, number: int) -> bool:
        return bool(self._array[_PASSED] >= number)

    def expired(self, number: int) -> bool:
        return bool(self._array[_EXPIRED] >= number > 0)

    def expired_last(self, number: int) -> bool:
        return bool(self._array[_EXPIRED] == number > 0)


class ThreadFlags:
    """Flags of the thread that runs a model on the CPU: the thread itself waits."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._numbers = [0] * _COUNT

    def arrive(self, number: int) -> None:
        self._numbers[_ARRIVED] = number

    def hold(self, number: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._numbers[_RELEASED] >= number, self._limit_s):
                self._numbers[_EXPIRED] = number

    def go_on(self, number: int) -> None:
        self._numbers[_PASSED] = number

    def has_arrived(self, number: int) -> bool:
        return self._numbers[_ARRIVED] >= number

    def release(self, number: int) -> None:
        with self._changed:
            self._numbers[_RELEASED] = number
            self._changed.notify()

    def has_passed(self, number: int) -> bool:
        return self._numbers[_PASSED] >= number

    def expired(self, number: int) -> bool:
        return self._numbers[_EXPIRED] >= number > 0

    def expired_last(self, number: int) -> bool:
        return self._numbers[_EXPIRED] == number > 0
