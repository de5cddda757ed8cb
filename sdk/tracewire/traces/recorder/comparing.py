"""Two runs of one trace compared: the first token that differs, and the first saved value, and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from tracewire.traces.state import Choice, State
from tracewire_bus.wire.kinds import is_array

__all__ = ["ChoiceDifference", "TokenDifference", "ValueDifference", "compared"]


class TokenDifference(msgspec.Struct, frozen=True):
    """The first token that differs: its index, and its id in the recording and in the second run.

    `None` stands for no token: that run had ended.
    """

    index: int
    recorded: int | None
    got: int | None


class ValueDifference(msgspec.Struct, frozen=True):
    """The first value of a save that differs.

    Attributes:
        name: of the save.
        index: of the item in the saved list, which is the token's index for a read of each step; None for no list.
        amount: the greatest absolute difference of its numbers; None where it is none of numbers alone.
        relative: `amount`, divided by the greatest absolute number recorded there; None likewise, and for zeros.
        what: the difference in words.
    """

    name: str
    index: int | None
    amount: float | None
    relative: float | None
    what: str


class ChoiceDifference(msgspec.Struct, frozen=True):
    """What differs in one choice. `tokens` is how many tokens from the beginning are the same."""

    invoke: int
    choice: int
    tokens: int
    token: TokenDifference | None
    values: list[ValueDifference]


async def compared(recorded: State, got: State, *, whole: bool, tolerance: float = 0.0) -> list[ChoiceDifference]:
    """Compare two states, choice by choice.

    Args:
        recorded: of the recording.
        got: of the second run.
        whole: whether the recorded run ended by itself. Otherwise the second run may have more tokens and items.
        tolerance: numbers that differ by at most this are the same.

    Raises:
        ValueMissing: a large array cannot be loaded.
    """
    others = {(one.invoke, one.choice): one for one in _choices(got)}
    found = []
    for one in _choices(recorded):
        other = others.get((one.invoke, one.choice)) or Choice(one.invoke, one.choice, saves=one.saves)
        token = _token(one.token_ids, other.token_ids, whole)
        same = len(one.token_ids) if token is None else token.index
        # Items of later steps follow from the token that differs.
        most = None if token is None else token.index + 1
        values = await _values(one, other, most, tolerance)
        found.append(ChoiceDifference(one.invoke, one.choice, same, token, values))
    return found


def _choices(state: State) -> Iterator[Choice]:
    for invoke in state.invokes:
        yield from invoke.choices


def _token(recorded: list[int], got: list[int], whole: bool) -> TokenDifference | None:
    for index, (one, other) in enumerate(zip(recorded, got, strict=False)):
        if one != other:
            return TokenDifference(index, one, other)
    if len(got) < len(recorded):
        return TokenDifference(len(got), recorded[len(got)], None)
    if whole and len(got) > len(recorded):
        return TokenDifference(len(recorded), None, got[len(recorded)])
    return None


async def _values(recorded: Choice, got: Choice, most: int | None, tolerance: float) -> list[ValueDifference]:
    """The first difference of each save, in the order of their items."""
    mine, theirs = await recorded.saves.load(exact=True), await got.saves.load(exact=True)
    found = []
    for name in mine:
        if name not in theirs:
            found.append(ValueDifference(str(name), None, None, None, "the second run did not save it"))
        elif (one := _first(str(name), mine[name], theirs[name], most, tolerance)) is not None:
            found.append(one)
    return sorted(found, key=lambda one: -1 if one.index is None else one.index)


def _first(name: str, mine: Any, theirs: Any, most: int | None, tolerance: float) -> ValueDifference | None:
    if not isinstance(mine, list) or not isinstance(theirs, list):
        return _difference(name, None, mine, theirs, tolerance) if most is None else None
    for index, (one, other) in enumerate(zip(mine[:most], theirs[:most], strict=False)):
        if (found := _difference(name, index, one, other, tolerance)) is not None:
            return found
    if most is None and len(theirs) < len(mine):
        return ValueDifference(name, len(theirs), None, None, f"expected {len(mine)} items, got {len(theirs)}")
    return None


def _difference(name: str, index: int | None, mine: Any, theirs: Any, tolerance: float) -> ValueDifference | None:
    """The difference of two values; None if they are the same."""
    import numpy as np

    if isinstance(mine, dict) and isinstance(theirs, dict) and mine.keys() == theirs.keys():
        found = (_difference(f"{name}.{key}", index, mine[key], theirs[key], tolerance) for key in mine)
        return next((one for one in found if one is not None), None)
    if isinstance(mine, list | tuple) and isinstance(theirs, list | tuple) and len(mine) == len(theirs):
        parts = (_difference(name, index, one, other, tolerance) for one, other in zip(mine, theirs, strict=True))
        return next((one for one in parts if one is not None), None)
    if not (_is_numeric(mine) and _is_numeric(theirs)):
        same = type(mine) is type(theirs) and not is_array(mine) and mine == theirs
        return None if same else ValueDifference(name, index, None, None, f"expected {mine!r}, got {theirs!r}"[:300])
    complex_ = any(np.iscomplexobj(value) for value in (mine, theirs))
    one, other = (np.asarray(value, np.complex128 if complex_ else np.float64) for value in (mine, theirs))
    if one.shape != other.shape:
        return ValueDifference(name, index, None, None, f"expected shape {[*one.shape]}, got {[*other.shape]}")
    with np.errstate(invalid="ignore"):
        apart = np.abs(one - other)
    # Equal infinities and NaNs are the same.
    apart = np.where((one == other) | (np.isnan(one) & np.isnan(other)), 0.0, apart)
    if not apart.size or bool((apart <= tolerance).all()):
        return None
    known = apart[~np.isnan(apart)]
    amount = float(known.max()) if known.size else float("nan")
    scale = float(np.abs(one[np.isfinite(one)]).max(initial=0.0))
    relative = amount / scale if scale else None
    return ValueDifference(name, index, amount, relative, f"differs by up to {amount:.3g}")


def _is_numeric(value: Any) -> bool:
    if is_array(value):
        return value.dtype.kind not in "OUS"
    return isinstance(value, int | float | complex)
