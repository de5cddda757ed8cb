"""What makes two values of the wire the same, found by comparing them: what digests are held against."""

from __future__ import annotations

from typing import Any

from tracewire_bus.wire.values import (
    MAX_DEPTH,
    ArrayRef,
    Path,
    _array,
    _complex,
    _digest,
    _dtype_name,
    _float,
    _kind,
    _raw,
    _refuse,
    _too_deep,
)

__all__ = ["equal"]


def equal(a: Any, b: Any) -> bool:
    """Whether two values are the same in the sense of `digest`, found by comparing them.

    Raises:
        Unsavable: one of them holds what cannot travel, where they had not differed before.
    """
    return _equal(a, b, ())


def _equal(a: Any, b: Any, path: Path) -> bool:
    found = _kind(a) or _refuse(a, path)
    if found != (_kind(b) or _refuse(b, path)):
        return False
    if found in ("list", "tuple", "dict"):
        if len(path) >= MAX_DEPTH:
            _too_deep(path)
        if len(a) != len(b):
            return False
        if found == "dict":
            return all(key in b and _equal(item, b[key], (*path, key)) for key, item in dict.items(a))
        return all(_equal(x, y, (*path, index)) for index, (x, y) in enumerate(zip(a, b, strict=True)))
    if found == "array" and (isinstance(a, ArrayRef) or isinstance(b, ArrayRef)):
        return _digest(a, path) == _digest(b, path)
    if found == "array":
        x, y = _array(a, path), _array(b, path)
        return x.dtype.name == y.dtype.name and x.shape == y.shape and bytes(_raw(x)) == bytes(_raw(y))
    if found == "float":
        return _float.pack(a) == _float.pack(b)
    if found == "dtype":
        return _dtype_name(a, path) == _dtype_name(b, path)
    if found == "complex":
        return _complex.pack(a.real, a.imag) == _complex.pack(b.real, b.imag)
    return bool(a == b)
