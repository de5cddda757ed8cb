"""Saves as metadata: what is small is written whole."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tracewire import ArrayRef, Live, Steer, When
from tracewire.inspect.metadata import declaration, summary

ROW = np.zeros((2, 64), np.float32)
LARGE = {"dtype": "float32", "shape": [2, 64]}


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, None),
        (True, True),
        (1.5, 1.5),
        ("text", "text"),
        ("x" * 20_000, {"length": 20_000}),
        (np.float32(1.5), 1.5),
        (np.arange(3), [0, 1, 2]),
        (np.array([1.5, 2.0], ml_dtypes.bfloat16), [1.5, 2.0]),
        (ROW, LARGE),
        (np.zeros(2, np.complex64), {"dtype": "complex64", "shape": [2]}),
        (ArrayRef("bfloat16", (9, 9), bytes(16), "blob"), {"dtype": "bfloat16", "shape": [9, 9]}),
        ([0.5, 1.5], [0.5, 1.5]),
        ([], []),
        ([ROW, ROW, ROW], {"dtype": "float32", "shape": [3, 2, 64]}),
        ([ROW] * 2000, {"dtype": "float32", "shape": [2000, 2, 64]}),
        ([ROW, ROW[:1], 1], [LARGE, {"dtype": "float32", "shape": [1, 64]}, 1]),
        ([1.0] * 2000, {"length": 2000}),
        ({"a": {1: (1, 2)}}, {"a": {"1": [1, 2]}}),
        (1j, "1j"),
    ],
    ids=str,
)
def test_a_value_is_written_as_json(value: Any, written: Any) -> None:
    assert summary(value) == written
    assert json.loads(json.dumps(summary(value))) == written


def test_an_intervention_has_its_form_over_http() -> None:
    found = declaration(Steer("residual(2)", np.zeros(64, np.float32), scale=Live("alpha"), when=When(every=2)))
    assert (found["do"], found["at"]) == ("steer", "residual(2)")
    assert found["vector"] == {"dtype": "float32", "shape": [64]}
    assert (found["scale"]["live"], found["when"]["every"]) == ("alpha", 2)
    json.dumps(found)
