"""Values that arrived, as tensors of a worker's device."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from tracewire_bus.wire.digests import digest
from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.protocol.input_files import input_path
from tracewire_engine.worker.tensors import to_tensors

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "dtype", [np.float32, np.int8, np.bool_, np.complex64, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_an_array_is_a_tensor_of_the_same_dtype_shape_and_bits(dtype: type, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    tensor = to_tensors(array, CPU)
    assert str(tensor.dtype) == f"torch.{array.dtype.name}"
    assert tuple(tensor.shape) == shape
    assert bytes(tensor.untyped_storage()) == array.tobytes()


def test_containers_are_new_and_may_be_changed() -> None:
    given = {"a": [np.zeros(2), (1, "x")], "b": np.dtype("float16")}
    found = to_tensors(given, CPU)
    found["a"].append(1)
    found["a"][0][0] = 5
    assert (len(given["a"]), given["a"][0].tolist()) == (2, [0.0, 0.0])
    assert (found["a"][1], found["b"]) == ((1, "x"), torch.float16)


def test_what_only_refers_to_an_array_is_read_from_its_file(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    ref = ArrayRef("float32", array.shape, digest(array), "b")
    input_path(tmp_path, ref).write_bytes(array.tobytes())
    found = to_tensors([ref], CPU, tmp_path)[0]
    assert found.tolist() == array.tolist()
    # A trace's own: what it changes there, no other sees.
    found.zero_()
    assert to_tensors(ref, CPU, tmp_path).tolist() == array.tolist()
