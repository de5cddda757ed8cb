"""The memory of a process that serves for long: allocations and garbage collection delay what it serves little."""

from __future__ import annotations

import ctypes
import gc

__all__ = ["settle_memory"]

#: Parameters of glibc's `mallopt`, and their values in bytes: how much free memory at the heap's end may stay, and from
#: which size on a block is a mapping of its own.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = (-1, 64 << 20), (-3, 32 << 20)


def settle_memory() -> None:
    """Set up this process's memory, once it has loaded all that stays."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # Each flush frees what the next one needs again. The kernel takes microseconds to hand out a page.
        mallopt(*_TRIM_THRESHOLD)
        mallopt(*_MMAP_THRESHOLD)
    # All objects that exist by now stay. Without this, every full collection would walk them while all traces wait.
    gc.collect()
    gc.freeze()
    # Traces leave little garbage, and with the default thresholds collections took a tenth of the adapter's time. With
    # these, a collection of the second generation looks at 40,000 objects at most, which takes 20 ms on a slow core.
    gc.set_threshold(10_000, 3, 20)
    gc.enable()
