"""What a table says of a saved value: its kind, size, dtype and shape, and its first or last elements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tracewire_bus.wire.arrays import array_of
from tracewire_bus.wire.kinds import is_array
from tracewire_bus.wire.refs import ArrayRef

__all__ = ["Preview", "number", "preview", "scalar", "series"]

#: How many elements of an array, and how many characters of a text a preview has.
_ELEMENTS, _CHARACTERS = 4, 60
#: How many keys of a dict a preview names.
_KEYS = 6


class Preview(msgspec.Struct, frozen=True):
    """A row of a table of saves.

    Attributes:
        kind: `list of 64`, `dict of 3`, `array`, `text`, `number`, ...
        dtype, shape: those of the arrays, for a list those of its items; "" where there are none.
        text: elements, or what else tells values apart.
    """

    kind: str
    dtype: str = ""
    shape: str = ""
    text: str = ""


def number(value: float) -> str:
    """A number for people: four significant digits."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"


def scalar(value: Any) -> float | None:
    """The number in a value: itself, or the element of an array with one element; else None."""
    if isinstance(value, bool | int | float):
        return float(value)
    if is_array(value) and math.prod(value.shape) == 1:
        array: Any = array_of(value)
        return None if array.dtype.kind == "c" else float(array.reshape(()))
    return None


def series(value: Any) -> list[float | None] | None:
    """A saved list, or array of one dimension, of numbers as such a list. None for any other value."""
    if is_array(value):
        array: Any = array_of(value)
        return [float(one) for one in array] if array.ndim == 1 and array.dtype.kind != "c" else None
    if not isinstance(value, list) or not value:
        return None
    found = [None if item is None else scalar(item) for item in value]
    known = [one for item, one in zip(value, found, strict=True) if item is not None]
    return found if known and None not in known else None


def preview(value: Any) -> Preview:
    """The row of a value. It reads no more of a large value than it shows."""
    if isinstance(value, ArrayRef):
        return Preview("array", value.dtype, _shape(value.shape), f"{value.nbytes} bytes, not downloaded")
    if is_array(value):
        array = array_of(value)
        return Preview("array", array.dtype.name, _shape(array.shape), _elements(array))
    if isinstance(value, Mapping):
        names = [str(name) for name in list(value)[:_KEYS]]
        return Preview(f"dict of {len(value)}", text=_cut(", ".join(names) + (", …" if len(value) > _KEYS else "")))
    if isinstance(value, list | tuple | set | frozenset):
        return _of_items(value)
    if isinstance(value, str):
        return Preview("text", text=_cut(repr(value)))
    if isinstance(value, bool | int | float):
        return Preview("number", type(value).__name__, text=number(value))
    return Preview(type(value).__name__, text=_cut(repr(value)))


def _of_items(value: Sequence[Any] | set[Any] | frozenset[Any]) -> Preview:
    items = list(value)
    kind = f"{type(value).__name__} of {len(items)}"
    if not items:
        return Preview(kind)
    numbers = series(items)
    rows = [preview(item) for item in (items[0], items[-1])]
    dtype = rows[0].dtype if rows[0].dtype == rows[1].dtype else "differ"
    shape = rows[0].shape if rows[0].shape == rows[1].shape else "differ"
    if numbers is not None:
        known = [one for one in numbers if one is not None and math.isfinite(one)]
        if len(numbers) <= _ELEMENTS:
            return Preview(kind, dtype, shape, ", ".join("none" if one is None else number(one) for one in numbers))
        text = f"{number(min(known))} to {number(max(known))}, last {number(numbers[-1] or 0.0)}" if known else ""
        return Preview(kind, dtype, shape, text)
    last = rows[1]
    return Preview(kind, dtype, shape, f"last: {_lens(items[-1]) or last.text or last.kind}")


def _lens(item: Any) -> str:
    """The best token of each row of a lens, if this is one with strings."""
    strings = item.get("token_strings") if isinstance(item, Mapping) else None
    if not isinstance(strings, list) or not strings:
        return ""
    best = [row[0] if isinstance(row, list) and row else row for row in strings]
    return _cut(" ".join(repr(one) for one in best[:_KEYS]))


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _elements(array: Any) -> str:
    flat = array.reshape(-1)[:_ELEMENTS]
    if array.dtype.kind not in "biuf" and not array.dtype.name.startswith(("bfloat16", "float8")):
        return ""
    shown = [number(one.item() if array.dtype.kind in "biuf" else float(one)) for one in flat]
    return ", ".join(shown) + (", …" if array.size > _ELEMENTS else "")


def _cut(text: str) -> str:
    return text if len(text) <= _CHARACTERS else text[: _CHARACTERS - 1] + "…"
