"""What is a plain value, and which part of one is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tracewire import TraceRejected
from tracewire.plain_values import plain


def test_scalars_of_libraries_and_sequences_become_python_s() -> None:
    given = {"a": np.float32(0.5), 3: (np.int64(2), None, True), "set": {"y", "x"}}
    found = plain("f", given)
    assert found == {"a": 0.5, 3: [2, None, True], "set": ["x", "y"]}
    assert (type(found["a"]), type(found[3][0])) == (float, int)


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"a": [1, object()]}, "f.a[1]"),
        ({(1,): 2}, "f"),
        ({"a": float("nan")}, "f.a"),
        (["\ud800"], "f[0]"),
        (2**70, "f"),
        (np.zeros(3), "f"),
    ],
)
def test_what_is_not_plain_is_refused_with_its_place(value: Any, field: str) -> None:
    with pytest.raises(TraceRejected) as raised:
        plain("f", value)
    assert raised.value.field == field


def test_a_value_in_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TraceRejected, match="refers to itself"):
        plain("f", value)
