"""What tables say of saved values."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tracewire import ArrayRef
from tracewire.rendering.previews import Preview, number, preview, scalar, series

ROW = np.array([1, 2.5, 3, 4, 5], np.float32)
LENS = {"token_ids": [[5, 6]], "logits": [[1.0, 0.5]], "token_strings": [[" a", " b"]]}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3.14159, Preview("number", "float", text="3.142")),
        ("a text", Preview("text", text="'a text'")),
        (None, Preview("NoneType", text="None")),
        (ROW, Preview("array", "float32", "[5]", "1, 2.5, 3, 4, …")),
        (ROW.astype(ml_dtypes.bfloat16), Preview("array", "bfloat16", "[5]", "1, 2.5, 3, 4, …")),
        (np.array([1 + 2j]), Preview("array", "complex128", "[1]", "")),
        (ArrayRef("float16", (2, 3), bytes(16), 12), Preview("array", "float16", "[2, 3]", "12 bytes, not downloaded")),
        ({"a": 1, "b": 2}, Preview("dict of 2", text="a, b")),
        ([], Preview("list of 0")),
        ([1.0, None, 2.0], Preview("list of 3", "float", "", "1, none, 2")),
        ([float(one) for one in range(9)], Preview("list of 9", "float", "", "0 to 8, last 8")),
        ([ROW, ROW], Preview("list of 2", "float32", "[5]", "last: 1, 2.5, 3, 4, …")),
        ([ROW, ROW[:2]], Preview("list of 2", "float32", "differ", "last: 1, 2.5")),
        ([LENS], Preview("list of 1", text="last: ' a'")),
        ((1, "x"), Preview("tuple of 2", "differ", "", "last: 'x'")),
    ],
)
def test_each_kind(value: Any, expected: Preview) -> None:
    assert preview(value) == expected


def test_a_long_text_is_cut() -> None:
    assert len(preview("x" * 1000).text) == 60
    assert preview("x" * 1000).text.endswith("…")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, 1.0), (np.float16(0.5), 0.5), (np.ones((1, 1)), 1.0), (np.ones(2), None), ("1", None), (1j, None)],
)
def test_scalars(value: Any, expected: float | None) -> None:
    assert scalar(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([1, np.array([2.0]), None], [1.0, 2.0, None]),
        (np.array([1, 2]), [1.0, 2.0]),
        (np.ones((2, 2)), None),
        ([1, "x"], None),
        ([None], None),
        ([], None),
        ("12", None),
    ],
)
def test_series(value: Any, expected: Any) -> None:
    assert series(value) == expected


@pytest.mark.parametrize(
    ("value", "text"), [(2.0, "2"), (-3, "-3"), (0.00012345, "0.0001234"), (float("nan"), "nan"), (1e9, "1e+09")]
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text
