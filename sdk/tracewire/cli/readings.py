"""The saves of a trace as short texts and small plots, which stand beside its text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .format import printable, short_value

__all__ = ["Reading", "Readings", "items_of", "line_of", "sparkline", "value_text"]

_BARS = "▁▂▃▄▅▆▇█"
#: How many of the last numbers of a save are kept, and how many elements of an array are plotted.
_KEPT, _PLOTTED = 400, 256
_SHOWN_TOKENS = 4
#: The parts of an item of a `Features`.
_FEATURES = ("features", "activations")


def sparkline(numbers: Sequence[float], width: int) -> str:
    """The last `width` numbers as bars, the least of them lowest. Numbers that are not finite are dots."""
    shown = list(numbers)[-width:]
    finite = [number for number in shown if abs(number) < float("inf")]
    if not finite:
        return "·" * len(shown)
    least, span = min(finite), max(finite) - min(finite)
    top = len(_BARS) - 1
    bars = []
    for number in shown:
        if not abs(number) < float("inf"):
            bars.append("·")
        else:
            bars.append(_BARS[round((number - least) / span * top) if span else top // 2])
    return "".join(bars)


def value_text(value: Any) -> str:
    """One item of a save as a short text."""
    if isinstance(value, Mapping) and "token_ids" in value:
        return _lens_text(value)
    if isinstance(value, Mapping) and "features" in value:
        return _features_text(value)
    number = _number(value)
    return short_value(value if number is None else number)


def _lens_text(value: Mapping[str, Any]) -> str:
    """The likeliest token of each location of a `LogitLens`; of one location, the likeliest few."""
    shown = value.get("token_strings")
    if shown is None:
        shown = value["token_ids"].tolist() if hasattr(value["token_ids"], "tolist") else value["token_ids"]
    if shown and isinstance(shown[0], list):
        rows = [row[0] for row in shown if row and not isinstance(row[0], list)]
        return " ".join(str(one).strip() or repr(one) for one in rows) or short_value(shown)
    return " ".join(repr(one) for one in shown[:_SHOWN_TOKENS])


def _features_text(value: Mapping[str, Any]) -> str:
    """The strongest features of the last position and location of a `Features`, each with its activation."""
    rows = [value[name].tolist() if hasattr(value[name], "tolist") else value[name] for name in _FEATURES]
    while rows[0] and isinstance(rows[0][0], list):
        rows = [row[-1] for row in rows]
    found = [f"{one}:{amount:.3g}" for one, amount in zip(*rows, strict=True) if one >= 0]
    return " ".join(found[:_SHOWN_TOKENS]) or "no feature"


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        item = value.item()
        return float(item) if isinstance(item, int | float) else None
    return None


def _profile(value: Any) -> list[float] | None:
    """The elements of a short array of one dimension, such as one number a layer."""
    shape = getattr(value, "shape", None)
    if shape is None or len(shape) != 1 or not 1 < shape[0] <= _PLOTTED or not hasattr(value, "tolist"):
        return None
    numbers = [_number(one) for one in value.tolist()]
    return None if None in numbers else [one for one in numbers if one is not None]


class Reading:
    """One save of one choice: its last item as text, and its numbers.

    Attributes:
        text: the last item.
        numbers: the last numbers of a save that gains a number with each token.
        profile: the elements of the last item, if the item is a short array.
    """

    def __init__(self) -> None:
        self.text = ""
        self.numbers: deque[float] = deque(maxlen=_KEPT)
        self.profile: list[float] = []

    def add(self, item: Any) -> None:
        """Take an item."""
        self.text = printable(value_text(item))
        self.profile = _profile(item) or []
        if (number := _number(item)) is not None:
            self.numbers.append(number)

    def plot(self, width: int) -> str:
        """The numbers, or the profile of the last item, as bars; `""` if the save has neither."""
        return sparkline(self.profile or self.numbers, width) if self.profile or self.numbers else ""


class Readings:
    """The saves of a trace by name, from the deltas of its outputs."""

    def __init__(self) -> None:
        self.by_name: dict[str, Reading] = {}

    def feed(self, delta: Mapping[str, Any]) -> None:
        """Take the additions of an event to the saves."""
        for name, item in items_of(delta):
            self.by_name.setdefault(name, Reading()).add(item)

    def clear(self) -> None:
        """Forget all, as a trace does that starts again."""
        self.by_name.clear()


def items_of(delta: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The new items of saved lists, and other values, each with its name. Those of edits are named `EDIT/NAME`."""
    for name, value in delta.items():
        if isinstance(value, list):
            for item in value:
                yield name, item
        else:
            yield name, value


def line_of(delta: Mapping[str, Any]) -> str:
    """The last item of each save in an event, in one line."""
    last: dict[str, Any] = dict(items_of(delta))
    return "  ".join(f"{name}={value_text(value)}" for name, value in last.items())
