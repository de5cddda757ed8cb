"""Plain values of a submission: numbers, texts, None, and lists and dicts of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tracewire_bus.wire.ids import is_encodable

from .checks import shown, type_name
from .errors import TraceRejected

__all__ = ["plain"]


def plain(field: str, value: Any, depth: int = 0) -> Any:
    """`value` if it is made of plain values only; scalars of NumPy and torch become Python's.

    Raises:
        TraceRejected: it is not; `field` names the part at fault.
    """
    if depth > 32:
        raise TraceRejected(field, "the value nests too deep, or refers to itself")
    if isinstance(value, str) and not is_encodable(value):
        raise TraceRejected(field, f"expected text, got half of a surrogate pair in {shown(value)}")
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise TraceRejected(field, f"expected an integer of at most 64 bits, got {shown(value)}")
    if isinstance(value, float) and math.isnan(value):
        raise TraceRejected(field, "expected a number, got NaN")
    if value is None or isinstance(value, bool | str | int | float):
        for base in (bool, int, float, str):
            if isinstance(value, base):
                return base(value)
        return value
    if isinstance(value, Mapping):
        result = {}
        for key, item in value.items():
            if not isinstance(key, str | int):
                raise TraceRejected(field, f"expected keys that are strings or integers, got {shown(key)}")
            plain(field, key)
            result[key] = plain(f"{field}.{key}", item, depth + 1)
        return result
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [plain(f"{field}[{index}]", item, depth + 1) for index, item in enumerate(items)]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return plain(field, value.item(), depth + 1)
    raise TraceRejected(
        field, f"expected a number, a string, None, or a list or dict of them, got {type_name(type(value))}"
    )
