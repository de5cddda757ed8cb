"""How much memory of this process is in use: what its code keeps, and not what its allocators hold free.

Resident memory says little of a leak: it has the pages that the largest message so far has needed, and glibc gives
them back late, or never.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Final

import psutil

__all__ = ["in_use_mib"]

#: About the size of one of Python's small blocks, in bytes: most objects are dicts' keys, tuples, texts and numbers.
_BLOCK: Final = 64


class _Allocated(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks"),
            "keepcost",
        )
    ]


def in_use_mib() -> float:
    """What is allocated in this process, in MiB: by C's allocator, and about that by Python's for small objects."""
    gc.collect()
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        # Not glibc: resident memory is what there is.
        return float(psutil.Process().memory_info().rss) / 2**20
    mallinfo.restype = _Allocated
    found = mallinfo()
    return (found.uordblks + found.hblkhd + sys.getallocatedblocks() * _BLOCK) / 2**20
