"""A timer of the kernel's whose signal is not that of `signal.setitimer`, for a process that may send no signals.

A block can stop the process's first timer, or ignore its signal. Elsewhere a thread then sends the process another
signal (`turn_monitor.py`); a host of blocks may not send any.
"""

from __future__ import annotations

import ctypes
import os
import struct

__all__ = ["SecondTimer"]

_libc = ctypes.CDLL(None, use_errno=True)
_CLOCK_MONOTONIC = 1

#: C's `struct itimerspec`.
_Setting = ctypes.c_long * 4

#: C's `struct sigevent`: a value, the signal, and how it is sent (0: to the process).
_EVENT = struct.Struct("@Qii48x")


class SecondTimer:
    """Sends this process a signal when a time is over, and again each second until it is stopped.

    Args:
        number: of the signal.

    Raises:
        OSError: the kernel gives the process no timer.
    """

    def __init__(self, number: int) -> None:
        self._id = ctypes.c_void_p()
        self._settime = _libc.timer_settime
        self._setting = _Setting()
        self._pointer = ctypes.byref(self._setting)
        event = ctypes.create_string_buffer(_EVENT.pack(0, number, 0), _EVENT.size)
        if _libc.timer_create(_CLOCK_MONOTONIC, event, ctypes.byref(self._id)) < 0:
            failed = ctypes.get_errno()
            raise OSError(failed, os.strerror(failed))

    def start(self, seconds: float) -> None:
        """Send the signal after this time, unless the timer is set anew before."""
        self._set(seconds, 1)

    def stop(self) -> None:
        """Send no signal any more."""
        self._set(0.0, 0)

    def _set(self, seconds: float, again: int) -> None:
        whole = int(seconds)
        # Each location at which blocks run sets it twice, so nothing is made anew.
        self._setting[:] = [again, 0, whole, int((seconds - whole) * 1e9)]
        self._settime(self._id, 0, self._pointer, None)
