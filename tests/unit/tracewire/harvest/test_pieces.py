"""The bytes of a piece are an array's own, in C order and little-endian."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tracewire.harvest.pieces import raw, size


@pytest.mark.parametrize("dtype", [">f4", "float16", "bool", "complex128", ml_dtypes.bfloat16], ids=str)
def test_a_view_of_one_location_has_the_bytes_of_a_copy(dtype: Any) -> None:
    whole = (np.arange(24).reshape(4, 3, 2) % 5).astype(dtype)
    for index in range(3):
        view = whole[:, index]
        found = raw(view)
        assert bytes(found) == np.ascontiguousarray(view).astype(view.dtype.newbyteorder("<")).tobytes()
        assert size(view) == len(found) == 4 * 2 * whole.itemsize


def test_a_view_of_single_numbers() -> None:
    whole = np.arange(12, dtype=np.float32).reshape(4, 3)
    assert bytes(raw(whole[:, 1])) == whole[:, 1].tobytes()
    assert len(raw(whole[:0])) == 0


def test_bytes_are_their_own_piece() -> None:
    assert (raw(b"abc"), size(b"abc"), size(memoryview(b"ab"))) == (b"abc", 3, 2)
