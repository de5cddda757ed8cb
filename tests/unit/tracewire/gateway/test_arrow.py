"""Arrays as streams of Arrow's IPC format."""

from __future__ import annotations

import json
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest

from tracewire import LibraryMissing
from tracewire.gateway.arrow import arrow_stream
from tracewire_bus.wire.refs import DTYPES


def read(data: bytes) -> tuple[Any, dict[str, Any]]:
    """The column of a stream, and what its metadata say."""
    with pa.ipc.open_stream(data) as stream:
        table = stream.read_all()
    about = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    return table["value"].combine_chunks(), about


def values(column: Any) -> np.ndarray[Any, Any]:
    """The rows as an array."""
    if isinstance(column.type, pa.FixedShapeTensorType):
        return np.array(column.storage.to_pylist()).reshape(len(column), *column.type.shape)
    return np.array(column.to_pylist())


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_each_dtype_keeps_its_values(dtype: str) -> None:
    array = np.array([[1, 0, 1], [1, 1, 0]]).astype(getattr(ml_dtypes, dtype, dtype))
    column, about = read(arrow_stream(array))
    assert about == {"tracewire.dtype": dtype, "tracewire.shape": "[2, 3]"}
    found = values(column)
    if array.dtype.kind == "c":
        found = found[..., 0] + 1j * found[..., 1]
    # What is widened comes back as it was.
    assert np.array_equal(found.astype(array.dtype).view(np.uint8), array.view(np.uint8))


def test_bfloat16_is_exact_in_float32() -> None:
    array = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    # Infinities and NaNs have all bits of the exponent.
    array = array[(array.view(np.uint16) & 0x7F80) != 0x7F80]
    column, about = read(arrow_stream(array))
    assert (str(column.type), about["tracewire.dtype"]) == ("float", "bfloat16")
    assert np.array_equal(column.to_numpy().astype(ml_dtypes.bfloat16).view(np.uint16), array.view(np.uint16))


@pytest.mark.parametrize("shape", [(), (0,), (4,), (2, 3), (2, 3, 2), (0, 4), (4, 0)])
def test_rows_are_those_of_the_first_dimension(shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    column, about = read(arrow_stream(array))
    assert json.loads(about["tracewire.shape"]) == list(shape)
    assert len(column) == (shape or (1,))[0] or not array.size
    assert values(column).reshape(shape).tolist() == array.tolist()


def test_an_array_that_is_not_contiguous() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T[::2]
    assert np.array_equal(values(read(arrow_stream(array))[0]), array)


def test_without_pyarrow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(LibraryMissing, match=r"tracewire\[harvest\]"):
        arrow_stream(np.zeros(2))
