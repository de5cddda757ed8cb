"""Bytes in several buffers, so that large arrays are sent from their own memory and not copied into one message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

__all__ = ["LARGE_BYTES", "Pieces", "flatten"]

#: A buffer of at least this many bytes is sent as it is. Smaller ones are cheaper to copy together.
LARGE_BYTES: Final = 16 * 1024


class Pieces:
    """Bytes that lie in several buffers, in order. The buffers must not change.

    Attributes:
        buffers: the buffers, none of them empty.
    """

    __slots__ = ("_size", "buffers")

    def __init__(self, buffers: Iterable[bytes | memoryview]) -> None:
        self.buffers = tuple([buffer for buffer in buffers if buffer])
        self._size = sum(map(len, self.buffers))

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return b"".join(self.buffers)

    def __eq__(self, other: object) -> bool:
        return bytes(self) == (bytes(other) if isinstance(other, Pieces) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Pieces({len(self.buffers)} buffers, {self._size} bytes)"


def flatten(parts: Iterable[Any]) -> list[bytes | memoryview]:
    """The buffers of parts that are `Pieces` or single buffers, in order."""
    found: list[bytes | memoryview] = []
    for part in parts:
        if type(part) is Pieces:
            found += part.buffers
        else:
            found.append(part)
    return found
