"""Checks of plain arguments, and the text by which their errors show a wrong value."""

from __future__ import annotations

import math
from typing import Any

from tracewire_bus.store.keys import is_text, parse_id

__all__ = ["check_seconds", "check_text", "is_entry_id", "is_sendable_text", "shown", "type_name"]


def is_sendable_text(value: Any) -> bool:
    """Whether `value` is a string that can be sent as UTF-8: one without half of a surrogate pair."""
    return isinstance(value, str) and is_text(value)


def check_text(field: str, value: Any) -> str:
    """`value`, if it is a string that can be sent.

    Raises:
        TypeError: it is no string.
        ValueError: it has half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise TypeError(f"{field}: expected text, got {shown(value)}")
    if not is_text(value):
        raise ValueError(f"{field}: expected text, got half of a surrogate pair in {shown(value)}")
    return value


def check_seconds(field: str, value: Any, least: float = 0.0, most: float = 1e9) -> float:
    """`value`, if it is a number of seconds from `least` to `most`.

    Raises:
        TypeError: it is no number.
        ValueError: it is out of bounds, or NaN.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{field}: expected a number of seconds, got {shown(value)}")
    if not least <= value <= most:
        limit = "" if most == math.inf else f", {most:g} at most"
        raise ValueError(f"{field}: expected {least:g} seconds or more{limit}, got {shown(value)}")
    return value


def is_entry_id(value: Any) -> bool:
    """Whether `value` has the form of a stream entry's id, `<ms>-<n>`."""
    try:
        parse_id(check_text("id", value))
    except ValueError:
        return False
    return True


def shown(value: Any) -> str:
    """A value for an error: its `repr`, up to 60 characters, and its type."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type_name(type(value))})"


def type_name(kind: type) -> str:
    """A type as a caller knows it: `torch.Tensor`, `dict`, `app.Settings`."""
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
