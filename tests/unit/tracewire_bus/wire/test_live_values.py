"""Live parameters: what may be one, the form that a change must have, and how they travel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tracewire_bus.wire.live_values import MAX_BYTES, MAX_NAMES, LiveError, cast_to, live_values, pack_live, unpack_live


def test_each_has_a_form() -> None:
    given = {"a": True, "b": 2, "c": 0.5, "d": "x", "e": b"x", "f": np.zeros((2, 3), np.float16), "g": np.float32(1)}
    assert {name: one.form for name, one in live_values(given).items()} == {
        "a": "a boolean",
        "b": "a number",
        "c": "a number",
        "d": "a string",
        "e": "bytes",
        "f": "an array of float16 [2, 3]",
        "g": "a number",
    }


@pytest.mark.parametrize(
    ("values", "name", "says"),
    [
        ({"_a": 1}, "", "without a leading"),
        ({"class": 1}, "", "read as live.NAME"),
        ({"a b": 1}, "", "read as live.NAME"),
        ({1: 1}, "", "read as live.NAME"),
        ({"a": float("nan")}, "a", "finite number"),
        ({"a": np.array([1.0, np.inf])}, "a", "finite numbers"),
        ({"a": [1]}, "a", "got list"),
        ({"a": None}, "a", "got NoneType"),
        ({"a": "x" * (MAX_BYTES + 1)}, "a", "the limit is"),
        ({f"n{number}": 1 for number in range(MAX_NAMES + 1)}, "", f"at most {MAX_NAMES}"),
    ],
)
def test_what_cannot_be_one_is_named(values: dict[Any, Any], name: str, says: str) -> None:
    with pytest.raises(LiveError, match=says) as caught:
        live_values(values)
    assert caught.value.name == name


def test_an_array_of_another_floating_dtype_is_cast() -> None:
    (given,) = live_values({"a": np.array([0.5, 1.5], np.float64)}).values()
    fits = cast_to(given, "an array of float16 [2]")
    assert fits is not None
    assert (fits.form, fits.value.dtype, fits.value.tolist()) == ("an array of float16 [2]", np.float16, [0.5, 1.5])


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (np.array([0.5, 1.5]), "an array of float16 [3]"),
        (np.array([1, 2]), "an array of float16 [2]"),
        (np.array([1e9, 1.0]), "an array of float16 [2]"),
        (np.array([0.5, 1.5]), "an array of int8 [2]"),
        (1.0, "an array of float16 []"),
    ],
)
def test_nothing_else_is(value: Any, form: str) -> None:
    (given,) = live_values({"a": value}).values()
    assert cast_to(given, form) is None


def test_they_travel_together() -> None:
    given = live_values({"alpha": 0.5, "where": np.arange(3)})
    came = unpack_live(pack_live({name: one.packed for name, one in given.items()}))
    assert {name: one.form for name, one in came.items()} == {name: one.form for name, one in given.items()}
    assert came["where"].value.tolist() == [0, 1, 2]
    with pytest.raises(LiveError, match="by name, got list"):
        unpack_live(b"\x90")
