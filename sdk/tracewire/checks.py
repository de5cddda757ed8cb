"""Checks of plain arguments, and the text by which their errors show a wrong value."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any, TypeAlias

from tracewire_bus.wire.ids import is_encodable, parse_id

__all__ = [
    "Duration",
    "check_count",
    "check_limit",
    "check_seconds",
    "check_text",
    "is_entry_id",
    "is_sendable_text",
    "shown",
    "type_name",
]

Duration: TypeAlias = float | timedelta
"""A duration: a number of seconds, or a `timedelta`."""


def is_sendable_text(value: Any) -> bool:
    """Whether `value` is a string that can be sent as UTF-8: one without half of a surrogate pair."""
    return isinstance(value, str) and is_encodable(value)


def check_text(field: str, value: Any) -> str:
    """Return `value` if it is a string that can be sent as UTF-8. `field` is its name in errors.

    Raises:
        TypeError: the value is not a string.
        ValueError: it has half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise TypeError(f"{field}: expected text, got {shown(value)}")
    if not is_encodable(value):
        raise ValueError(f"{field}: expected text, got half of a surrogate pair in {shown(value)}")
    return value


def check_seconds(field: str, value: Any, least: float = 0.0, most: float = 1e9) -> float:
    """Return a duration in seconds, from `least` to `most`. `field` is its name in errors.

    Raises:
        TypeError: the value is neither a number nor a `timedelta`.
        ValueError: it is out of bounds, or NaN.
    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"{field}: expected a number of seconds or a timedelta, got {shown(value)}")
    if not least <= seconds <= most:
        limit = "" if most == math.inf else f", {most:g} at most"
        raise ValueError(f"{field}: expected {least:g} seconds or more{limit}, got {shown(value)}")
    return seconds


def check_limit(field: str, value: Any) -> float:
    """Return the limit on a call's time in seconds: a duration of at least 0, or `inf` for `None`.

    Raises:
        TypeError: the value is neither a duration nor `None`.
        ValueError: it is negative, or NaN.
    """
    return math.inf if value is None else check_seconds(field, value, most=math.inf)


def check_count(field: str, value: Any) -> int:
    """Return `value` if it is a positive integer of at most 31 bits. `field` is its name in errors.

    Raises:
        ValueError: the value is not such an integer.
    """
    if type(value) is not int or not 0 < value < 2**31:
        raise ValueError(f"{field}: expected a positive integer, got {shown(value)}")
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
