"""Names of threads as the kernel shows them, by which `keep_off_workers` knows those that need not keep to a core."""

from __future__ import annotations

import ctypes

__all__ = ["NAMED", "name_thread"]

#: The beginning of all such names.
NAMED = "tw-"

_SET_NAME = 15


def name_thread(name: str) -> None:
    """Name the calling thread `tw-NAME`; the kernel keeps 15 characters. Processes that it forks have the name too."""
    ctypes.CDLL(None).prctl(_SET_NAME, f"{NAMED}{name}".encode(), 0, 0, 0)
