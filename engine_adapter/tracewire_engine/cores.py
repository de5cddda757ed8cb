"""Which cores an engine's processes run on.

On a CPU, vLLM binds its workers to cores of their own and leaves some to everything else. Nothing keeps everything else
there, though: a process that wakes up on a worker's core takes it from the model, and the other threads of an operation
wait for the one that was there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil

__all__ = ["keep_off_workers", "off_the_model"]

_T = TypeVar("_T")

#: Linux has what this needs; elsewhere everything runs where it runs.
_PLACEABLE = hasattr(os, "sched_setaffinity")


def keep_off_workers() -> set[int]:
    """Keep this process and its descendants off the cores to which some of them, the workers, are bound.

    Returns the cores that are left to them; none if nothing was changed, because no worker is bound or no core is left.
    """
    if not _PLACEABLE:
        return set()
    own = os.sched_getaffinity(0)
    free: list[int] = [os.getpid()]
    bound: set[int] = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(ProcessLookupError):
            cores = os.sched_getaffinity(process.pid)
            if cores < own:
                bound |= cores
            else:
                free.append(process.pid)
    rest = own - bound
    if not bound or not rest:
        return set()
    for thread in _threads(free):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(thread, rest)
    return rest


def _threads(processes: list[int]) -> Iterator[int]:
    for process in processes:
        with suppress(FileNotFoundError):
            yield from (int(task.name) for task in Path(f"/proc/{process}/task").iterdir())


def off_the_model(start: Callable[[], _T]) -> _T:
    """What `start` returns; the threads that it starts run off this worker's cores, where others are its parent's."""
    own = os.sched_getaffinity(0) if _PLACEABLE else set()
    others = os.sched_getaffinity(os.getppid()) - own if _PLACEABLE else set()
    if not others:
        return start()
    os.sched_setaffinity(0, others)
    try:
        return start()
    finally:
        os.sched_setaffinity(0, own)
