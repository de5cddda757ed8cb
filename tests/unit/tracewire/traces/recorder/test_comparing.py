"""Two runs compared: the first token and the first value that differ, and by how much."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tracewire.traces.recorder.comparing import TokenDifference, compared
from tracewire.traces.state import State
from tracewire_bus.domain.fold import Fold
from tracewire_bus.wire.messages import DecodedOutput, Set


def state(tokens: list[int], **saves: Any) -> State:
    fold = Fold()
    deltas = [[Set(path=(name,), value=value) for name, value in saves.items()], *[[] for _ in tokens[1:]]]
    fold.apply(DecodedOutput(attempt=1, seq=0, token_ids=tokens, text="x", deltas=deltas))  # type: ignore[arg-type]
    return State("t", fold)


async def differences(one: State, other: State, **options: Any) -> Any:
    (found,) = await compared(one, other, **{"whole": True, **options})
    return found


@pytest.mark.parametrize(
    ("got", "whole", "token"),
    [
        ([1, 2, 3], True, None),
        ([1, 5, 3], True, TokenDifference(1, 2, 5)),
        ([1, 2], True, TokenDifference(2, 3, None)),
        ([1, 2, 3, 4], True, TokenDifference(3, None, 4)),
        # The recorded trace was cut off.
        ([1, 2, 3, 4], False, None),
    ],
)
async def test_the_first_token_that_differs(got: list[int], whole: bool, token: TokenDifference | None) -> None:
    found = await differences(state([1, 2, 3]), state(got), whole=whole)
    assert found.token == token
    assert found.tokens == (3 if token is None else token.index)


@pytest.mark.parametrize(
    ("mine", "theirs", "index", "amount"),
    [
        ([1.0, 2.0], [1.0, 2.5], 1, 0.5),
        ([np.float32([1, 2])], [np.float32([1, 2.25])], 0, 0.25),
        ([{"a": [1.0]}], [{"a": [1.5]}], 0, 0.5),
        (3.0, 4.0, None, 1.0),
        ([1.0, 2.0], [1.0], 1, None),
        ([np.zeros(2)], [np.zeros(3)], 0, None),
        (["a"], ["b"], 0, None),
        ([1.0], ["a"], 0, None),
        ([float("nan")], [1.0], 0, float("nan")),
        ([np.complex64([1 + 2j, 3])], [np.complex64([1 + 2j, 3 + 4j])], 0, 4.0),
        (1 + 2j, 1 + 5j, None, 3.0),
    ],
)
async def test_the_first_value_that_differs(mine: Any, theirs: Any, index: int | None, amount: float | None) -> None:
    (value,) = (await differences(state([1, 2], s=mine), state([1, 2], s=theirs))).values
    assert (value.name.partition(".")[0], value.index) == ("s", index)
    assert value.amount == (pytest.approx(amount, nan_ok=True) if amount is not None else None)


@pytest.mark.parametrize(
    "value",
    [
        [1.0, float("nan"), float("inf")],
        ["a"],
        [np.float32([1, np.nan])],
        {"a": (1, None)},
        True,
        [np.complex64([1 + 2j])],
    ],
)
async def test_what_is_the_same_is_no_difference(value: Any) -> None:
    assert (await differences(state([1, 2], s=value), state([1, 2], s=value))).values == []


async def test_a_tolerance_and_missing_saves() -> None:
    one, other = state([1], s=[1.0], only=[1.0]), state([1], s=[1.001])
    (value,) = (await differences(one, other, tolerance=0.01)).values
    assert (value.name, value.what) == ("only", "the second run did not save it")


async def test_values_behind_the_token_that_differs_are_not_compared() -> None:
    one, other = state([1, 2, 3], s=[1.0, 2.0, 3.0]), state([1, 9, 9], s=[1.0, 2.0, 9.0])
    assert (await differences(one, other)).values == []
