"""What makes two values of the wire the same, found by comparing them: what digests are held against."""

from __future__ import annotations

from typing import Any

from tracewire_bus.wire.arrays import array_of, raw_bytes
from tracewire_bus.wire.digests import _digest, _float
from tracewire_bus.wire.kinds import MAX_DEPTH, Path, dtype_name, kind_or_none, refuse_depth, refuse_type
from tracewire_bus.wire.packing import complex_struct
from tracewire_bus.wire.refs import ArrayRef

__all__ = ["equal"]


def equal(a: Any, b: Any) -> bool:
    """Whether two values are the same in the sense of `digest`, found by comparing them.

    Raises:
        Unsavable: one of them holds what cannot travel, where they had not differed before.
    """
    return _equal(a, b, ())


def _equal(a: Any, b: Any, path: Path) -> bool:
    found = kind_or_none(a) or refuse_type(a, path)
    if found != (kind_or_none(b) or refuse_type(b, path)):
        return False
    if found in ("list", "tuple", "dict"):
        if len(path) >= MAX_DEPTH:
            refuse_depth(path)
        if len(a) != len(b):
            return False
        if found == "dict":
            return all(key in b and _equal(item, b[key], (*path, key)) for key, item in dict.items(a))
        return all(_equal(x, y, (*path, index)) for index, (x, y) in enumerate(zip(a, b, strict=True)))
    if found == "array" and (isinstance(a, ArrayRef) or isinstance(b, ArrayRef)):
        return _digest(a, path) == _digest(b, path)
    if found == "array":
        x, y = array_of(a, path), array_of(b, path)
        return x.dtype.name == y.dtype.name and x.shape == y.shape and bytes(raw_bytes(x)) == bytes(raw_bytes(y))
    if found == "float":
        return _float.pack(a) == _float.pack(b)
    if found == "dtype":
        return dtype_name(a, path) == dtype_name(b, path)
    if found == "complex":
        return complex_struct.pack(a.real, a.imag) == complex_struct.pack(b.real, b.imag)
    return bool(a == b)
