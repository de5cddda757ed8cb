"""Refuses calls of a block that would divide, replace or end the process that runs the model.

Python announces such calls to audit hooks before it makes them. During a block's turn the hook of this module raises,
so the block gets an error at its own line. Calls from C code, from `ctypes` or from other threads are not seen.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["ForbiddenCall", "install"]

#: The events of calls that no block may make; and of those that it may make for its own child processes only.
_NEVER = frozenset({"os.fork", "os.forkpty", "os.exec", "os.killpg", "signal.pthread_kill"})
_OWN_CHILDREN = frozenset({"os.kill"})
_WATCHED = _NEVER | _OWN_CHILDREN


class ForbiddenCall(RuntimeError):
    """A block made a call that would divide, replace or end the process that runs the model for all requests."""


_installed = False


def install(in_turn: Callable[[], bool]) -> None:
    """Refuse these calls on the current thread while `in_turn` returns true. A hook cannot be removed again."""
    global _installed
    if _installed:
        return
    _installed = True
    watched, never, thread, current = _WATCHED, _NEVER, threading.get_ident(), threading.get_ident

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in watched or not in_turn() or current() != thread:
            return
        if event in never or not _is_child(arguments[0]):
            raise ForbiddenCall(
                f"a block may not call {event}: the process runs the model for all requests, and blocks may start "
                "other programs, such as by `subprocess`, and signal those"
            )

    sys.addaudithook(refuse)


def _is_child(pid: int) -> bool:
    """Whether a process is a child of this one."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command's name stands in parentheses and may hold anything.
            return int(file.read().rpartition(b")")[2].split()[1]) == os.getpid()
    except (OSError, ValueError, IndexError):
        return False
