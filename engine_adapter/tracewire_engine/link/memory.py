"""Compares and copies bytes by their addresses, without an object for each piece.

A host of blocks compares each array that it has served, and each that its blocks have saved. An array of a few
kilobytes is compared in a microsecond, of which views of it would take most.
"""

from __future__ import annotations

import ctypes

__all__ = ["copy_bytes", "same_bytes"]

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcmp.restype = ctypes.c_int


def same_bytes(first: int, second: int, size: int) -> bool:
    """Whether two pieces of memory of `size` bytes are equal.

    The caller holds both. Nothing is read at address 0, where no piece lies.
    """
    return size == 0 or (first != 0 and second != 0 and _memcmp(first, second, size) == 0)


def copy_bytes(target: int, source: int, size: int) -> None:
    """Copy `size` bytes from one address to another. The caller holds both pieces, which do not overlap."""
    ctypes.memmove(target, source, size)
