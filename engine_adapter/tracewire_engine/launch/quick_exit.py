"""Ends a process of an engine without clearing its interpreter.

Python frees every module when it ends. With vLLM loaded that takes about three seconds of a core, in one process of an
engine after the other, and vLLM kills an EngineCore that it has to wait for. So a process that has done its work calls
what is registered for its end, and leaves the rest of its memory to the operating system.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import sys
from contextlib import suppress
from multiprocessing import util
from typing import NoReturn

__all__ = ["leave", "leave_when_done"]

#: Below the priority of all others: multiprocessing calls this last.
_LAST = -1000


def leave(status: int) -> NoReturn:
    """End this process with this exit status, after the functions that are registered for its end, in Python or in C.

    Of the latter, vLLM's on a CPU removes the memory that ranks share.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # Whoever read it may be gone.
        with suppress(OSError, ValueError):
            stream.flush()
    # Holding the interpreter's lock, so that no thread goes on with what is gone.
    ctypes.PyDLL(None).exit(status)
    os._exit(status)


def leave_when_done() -> None:
    """Have this process leave when its function returns, if `multiprocessing` started it. Else do nothing."""
    if multiprocessing.parent_process() is not None:
        util.Finalize(None, _leave_unless_it_failed, exitpriority=_LAST)


def _leave_unless_it_failed() -> None:
    """Leave if the function of this process has returned. Otherwise multiprocessing reports what was raised."""
    raised = sys.exc_info()[1]
    if raised is None or (isinstance(raised, SystemExit) and raised.code in (None, 0)):
        leave(0)
