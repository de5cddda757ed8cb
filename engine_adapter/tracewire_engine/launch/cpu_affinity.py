"""Keeps an engine's other processes off the cores of its workers.

On a CPU, vLLM binds its workers to cores of their own and leaves some cores to the other processes. But nothing keeps
the other processes on those. A process that wakes up on a worker's core takes the core from one thread of the model,
and all other threads of the operation wait for that thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from tracewire_engine.link.thread_names import NAMED

__all__ = ["keep_off_workers"]

#: The prefixes of the names of threads that start with the cores of the worker's thread, and compute no model: those of
#: ZeroMQ, and those that run blocks (`NAMED` of `link/thread_names.py`).
_FREE = ("ZMQbg/", NAMED)


def keep_off_workers() -> set[int]:
    """Keep this process and its descendants off the cores to which its workers are bound.

    The workers' threads that send reports are moved too. Call this after the workers have run their model once, because
    vLLM binds threads as they start.

    Returns:
        The cores of the other processes. Empty if nothing was changed, because no worker is bound or no core is left.
    """
    if not hasattr(os, "sched_setaffinity"):  # not Linux
        return set()
    own = os.sched_getaffinity(0)
    bound: set[int] = set()
    free = [thread for thread, _, _ in _threads(os.getpid())]
    for process in psutil.Process().children(recursive=True):
        threads = list(_threads(process.pid))
        # The threads that compute the model are each bound to one core.
        model = [cores for _, name, cores in threads if cores < own and not name.startswith(_FREE)]
        bound.update(*model)
        free += [thread for thread, name, _ in threads if not model or name.startswith(_FREE)]
    rest = own - bound
    if not bound or not rest:
        return set()
    for thread in free:
        with suppress(ProcessLookupError):
            os.sched_setaffinity(thread, rest)
    return rest


def _threads(process: int) -> Iterator[tuple[int, str, set[int]]]:
    """The threads of a process: id, name and cores."""
    for task in _listed(Path(f"/proc/{process}/task")):
        with suppress(ProcessLookupError, FileNotFoundError):
            yield int(task.name), (task / "comm").read_text(), os.sched_getaffinity(int(task.name))


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []
