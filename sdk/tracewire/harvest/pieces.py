"""The pieces of which a file is written: bytes, or arrays, whose bytes are taken when the file is written.

A shard's arrays may be views of the saves of a prompt at one of several locations. One of them after the other is
copied, so a shard's values are in memory once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Piece", "raw", "size"]

Piece: TypeAlias = "bytes | memoryview | np.ndarray[Any, Any]"


def size(piece: Piece) -> int:
    """How many bytes a piece has."""
    return len(piece) if isinstance(piece, bytes) else int(piece.nbytes)


def raw(piece: Piece) -> bytes | memoryview:
    """A piece's bytes: an array's are little-endian, and in C order."""
    if isinstance(piece, bytes | memoryview):
        return piece
    import numpy as np

    native = piece if piece.dtype.isnative else piece.astype(piece.dtype.newbyteorder("="))
    # Plain integers, since NumPy copies bfloat16 element by element, and lends out no buffer of it.
    plain = native.view(f"u{native.itemsize}") if native.itemsize in (1, 2, 4, 8) else native
    return np.ascontiguousarray(plain).reshape(-1).view(np.uint8).data
