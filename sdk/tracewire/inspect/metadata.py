"""The saves of a trace as the metadata of an output: small values whole, arrays by dtype and shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tracewire_bus.wire.arrays import array_of
from tracewire_bus.wire.kinds import is_array
from tracewire_bus.wire.refs import ArrayRef

__all__ = ["declaration", "summary"]

#: The most elements of an array, and the most items of a list, that are written whole.
_ELEMENTS = 16
_ITEMS = 1024
#: The most characters of a text that are written.
_CHARACTERS = 10_000


def summary(value: Any) -> Any:
    """`value` as JSON: numbers, texts and small arrays whole, other arrays as `{"dtype": ..., "shape": [...]}`.

    A list of large arrays of one dtype and shape is one such object, with the list's length as the first size. A long
    list and a long text are `{"length": ...}`.
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value if len(value) <= _CHARACTERS else {"length": len(value)}
    if isinstance(value, ArrayRef) or is_array(value):
        return _array(value)
    if isinstance(value, Mapping):
        return {str(key): summary(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return _list(list(value))
    return str(value)


def _array(value: Any) -> Any:
    if isinstance(value, ArrayRef):
        return {"dtype": value.dtype, "shape": list(value.shape)}
    array = array_of(value)
    if array.size > _ELEMENTS or array.dtype.kind == "c":
        return {"dtype": array.dtype.name, "shape": list(array.shape)}
    return array.astype("float64").tolist() if array.dtype.kind not in "biu" else array.tolist()


def _list(items: Sequence[Any]) -> Any:
    first = summary(items[0]) if items else None
    if isinstance(first, dict) and first.keys() == {"dtype", "shape"} and _are_arrays(items):
        kinds = [_array(item) for item in items]
        if all(kind == first for kind in kinds):
            return {"dtype": first["dtype"], "shape": [len(items), *first["shape"]]}
    if len(items) > _ITEMS:
        return {"length": len(items)}
    return [summary(item) for item in items]


def _are_arrays(items: Sequence[Any]) -> bool:
    return all(isinstance(item, ArrayRef) or is_array(item) for item in items)


def declaration(value: Any) -> Any:
    """A declared intervention in its form over HTTP, without the fields that are None; its arrays as in `summary`."""
    if not isinstance(value, msgspec.Struct):
        return summary(value)
    fields = {name: declaration(getattr(value, name)) for name in value.__struct_fields__}
    tag = value.__struct_config__.tag
    named = {"do": tag} if isinstance(tag, str) else {}
    return {**named, **{name: one for name, one in fields.items() if one is not None}}
