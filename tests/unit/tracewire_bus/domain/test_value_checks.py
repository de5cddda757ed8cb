"""Numbers and arrays of declared interventions, and the field that an error names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tracewire_bus.domain.value_checks import DeclarationError, check_array, check_number
from tracewire_bus.wire.refs import ArrayRef


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (3.0, "expected an array, got float"),
        (np.ones((2, 2, 4)), r"shape \[hidden\] or \[n, hidden\], got \[2, 2, 4\]"),
        (np.ones((0, 4)), r"got \[0, 4\]"),
        (np.ones(5), "hidden size is 4"),
        (np.array([1, np.nan, 1, 1]), "NaN"),
        (ArrayRef("float32", (4,), bytes(16), "blob"), "belongs to a trace"),
    ],
)
def test_an_array_that_does_not_fit_is_refused_by_its_field(value: Any, says: str) -> None:
    with pytest.raises(DeclarationError, match=says) as caught:
        check_array(value, "interventions[2].values", (1, 2), 4)
    assert caught.value.field == "interventions[2].values"


def test_an_array_that_fits_has_its_shape_returned() -> None:
    assert check_array(np.ones((3, 4)), "f", (1, 2), 4) == (3, 4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_is_finite(value: float) -> None:
    with pytest.raises(DeclarationError, match="expected a"):
        check_number(value, "f")
