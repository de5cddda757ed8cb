"""Columns: the items that several saved lists gain in one step, as one record of raw bytes.

Declared interventions read the same names, dtypes and shapes step after step. A record therefore holds the raw values
of all names one after the other, and a *layout* that says which bytes belong to which name. The layout is the same in
every step, so both sides decode it once and remember it. A consumer makes arrays only when a caller asks for them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
import xxhash

from .arrays import extra_dtypes
from .refs import DTYPES

__all__ = ["NUMBER", "Column", "ColumnLayout", "ColumnPart", "encode_layout", "layout_of", "record_digest"]

#: The dtype of a part that is a Python float, and not an array: a float32 on the wire.
NUMBER: Final = "number"

_number = struct.Struct("<f")


class ColumnPart(msgspec.Struct, array_like=True, frozen=True):
    """One array of an item. `key` is the array's key where the item is a dict of arrays, and `""` where the item is
    the array itself. `dtype` is a name in `DTYPES`, or `NUMBER`.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]


class Column(msgspec.Struct, array_like=True, frozen=True):
    """One saved name, whose list gains one item with every record."""

    name: str
    parts: tuple[ColumnPart, ...]


_encoder = msgspec.msgpack.Encoder()
_columns = msgspec.msgpack.Decoder(tuple[Column, ...])


def encode_layout(columns: Sequence[Column]) -> bytes:
    """The layout of records that hold these columns in this order, as it travels with each record."""
    return _encoder.encode(columns)


class ColumnLayout:
    """A decoded layout of columns.

    Attributes:
        names: the saved names, in the order of their values in a record.
        nbytes: the size of a record's values, in bytes.
    """

    def __init__(self, encoded: bytes) -> None:
        self._columns = _columns.decode(encoded)
        self.names = tuple(column.name for column in self._columns)
        self._makers: list[tuple[str, Callable[[memoryview], Any]]] = []
        self._spans: list[tuple[int, int]] = []
        start = 0
        for column in self._columns:
            if not column.parts:
                raise ValueError(f"column {column.name!r} has no part")
            began = start
            parts: list[tuple[str, Callable[[memoryview], Any]]] = []
            for part in column.parts:
                size, maker = _maker(part, start)
                parts.append((part.key, maker))
                start += size
            keyed = len(parts) != 1 or bool(parts[0][0])
            self._makers.append((column.name, _dict_maker(parts) if keyed else parts[0][1]))
            self._spans.append((began, start))
        self.nbytes = start
        if len(set(self.names)) != len(self.names):
            raise ValueError("a layout of columns names one of them twice")

    def items(self, values: memoryview, names: Collection[str] | None = None) -> list[tuple[str, Any]]:
        """The item that each name gains: an array, a float, or a dict of arrays. Arrays share memory with `values`.

        `names` limits which items are made.
        """
        return [(name, make(values)) for name, make in self._makers if names is None or name in names]

    def cut(self, values: memoryview, names: Collection[str]) -> tuple[bytes, memoryview]:
        """The layout and a copy of the values of some names only."""
        kept = [(column, span) for column, span in zip(self._columns, self._spans, strict=True) if column.name in names]
        joined = b"".join([values[start:end] for _, (start, end) in kept])
        return encode_layout([column for column, _ in kept]), memoryview(joined)


@lru_cache(maxsize=1024)
def layout_of(encoded: bytes) -> ColumnLayout:
    """A decoded layout of columns.

    Raises:
        ValueError: they are no layout.
    """
    return ColumnLayout(encoded)


def record_digest(layout: bytes, *values: bytes | memoryview) -> bytes:
    """16 bytes that two records share only if their layouts and values are the same (XXH3, of 128 bits).

    The values may lie in several buffers.
    """
    state = xxhash.xxh3_128(layout)
    for part in values:
        state.update(part)
    return state.digest()


def _maker(part: ColumnPart, start: int) -> tuple[int, Callable[[memoryview], Any]]:
    """The size of a part in bytes, and a function that makes the part from a record, where it begins at `start`.

    Raises:
        ValueError: there is no such array.
    """
    import numpy as np

    if part.dtype == NUMBER:
        return _number.size, lambda values: _number.unpack_from(values, start)[0]
    if part.dtype not in DTYPES:
        raise ValueError(f"a column of unknown dtype {part.dtype[:40]!r}")
    if len(part.shape) > 32 or any(size < 0 for size in part.shape):
        raise ValueError(f"a column of impossible shape {part.shape}")
    dtype = extra_dtypes().get(part.dtype) or np.dtype(part.dtype).newbyteorder("<")
    shape, size = part.shape, math.prod(part.shape) * dtype.itemsize
    if not size:
        return 0, lambda values: np.ndarray(shape, dtype)
    return size, lambda values: np.ndarray(shape, dtype, values, start)


def _dict_maker(parts: list[tuple[str, Callable[[memoryview], Any]]]) -> Callable[[memoryview], dict[str, Any]]:
    return lambda values: {key: make(values) for key, make in parts}
