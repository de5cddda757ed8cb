"""Arrays of NumPy and torch of any dtype and shape arrive as they were."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.support.equality import equal
from tests.support.values import dtype_of
from tracewire_bus.wire.arrays import array_of, array_payload, extra_dtypes, payload_parts, raw_bytes
from tracewire_bus.wire.digests import digest
from tracewire_bus.wire.kinds import Unsavable, is_array
from tracewire_bus.wire.packing import pack, unpack
from tracewire_bus.wire.refs import DTYPES
from tracewire_engine.worker.tensors import to_tensors


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3)])
def test_every_dtype_in_every_sort_of_shape(name: str, shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).astype(dtype_of(name)).reshape(shape)
    arrived = unpack(pack(array))
    assert (arrived.dtype, arrived.shape) == (array.dtype, shape)
    assert arrived.tobytes() == array.tobytes()


@pytest.mark.parametrize("name", ["int16", "uint64", "float32", "complex128"])
def test_big_endian_arrays_arrive_in_little_endian(name: str) -> None:
    array = np.arange(6).astype(np.dtype(name).newbyteorder(">"))
    arrived = unpack(pack(array))
    assert arrived.dtype == np.dtype(name)
    assert arrived.tolist() == array.tolist()
    assert digest(array) == digest(arrived)


def test_decoding_copies_no_array() -> None:
    data = pack({"a": np.arange(1000, dtype=np.float32), "b": np.ones(7, ml_dtypes.bfloat16)})
    whole = np.frombuffer(data, np.uint8)
    for array in unpack(data).values():
        assert np.shares_memory(array, whole)
        assert not array.flags.writeable


def test_arrays_decoded_from_a_writable_buffer_are_read_only() -> None:
    (array,) = unpack(memoryview(bytearray(pack([np.zeros(3)]))))
    assert not array.flags.writeable


def test_an_array_costs_little_more_than_its_bytes() -> None:
    assert len(pack(np.zeros(4096, np.float16))) < 8192 + 40


def test_numpy_scalars_arrive_as_arrays_without_dimensions() -> None:
    for scalar in (np.float64(1.5), np.float32(1.5), np.int8(-3), np.bool_(True), ml_dtypes.bfloat16(2)):
        arrived = unpack(pack(scalar))
        assert arrived.shape == ()
        assert arrived.dtype == scalar.dtype
        assert arrived == scalar
    assert unpack(pack(np.str_("text"))) == "text"


@pytest.mark.parametrize("name", [name for name in sorted(DTYPES) if hasattr(torch, name)])
def test_every_dtype_of_torch(name: str) -> None:
    dtype = getattr(torch, name)
    for tensor in (
        torch.tensor([[0, 1], [1, 0]], dtype=torch.float32).to(dtype),
        torch.ones((), dtype=torch.float32).to(dtype),
        torch.empty((2, 0, 3), dtype=dtype),
        torch.ones((4, 6), dtype=torch.float32).to(dtype).T[1:3],
    ):
        arrived = unpack(pack(tensor))
        assert arrived.dtype.name == name
        assert arrived.shape == tuple(tensor.shape)
        assert digest(tensor) == digest(arrived)
        assert equal(tensor, arrived)
        # The same values, in a type that both can be turned into.
        wide = "complex128" if tensor.is_complex() else "float64"
        assert arrived.astype(wide).tolist() == tensor.contiguous().to(getattr(torch, wide)).tolist()


def test_tensors_with_more_to_them() -> None:
    plain = torch.arange(6.0).reshape(2, 3)
    assert equal(plain.clone().requires_grad_() * 1, plain)
    assert equal(torch.nn.Parameter(plain), plain)
    conjugate = torch.complex(plain, plain).conj()
    assert conjugate.is_conj()
    assert unpack(pack(conjugate)).imag.tolist() == (-plain).tolist()
    assert unpack(pack(conjugate.imag)).tolist() == (-plain).tolist()
    assert equal(plain.expand(4, 2, 3), np.broadcast_to(plain.numpy(), (4, 2, 3)))
    with torch.inference_mode():
        assert equal(plain * 2, plain.numpy() * 2)


def test_tensors_that_cannot_travel() -> None:
    for tensor, said in [
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.zeros(2, dtype=torch.complex32), "complex32"),
    ]:
        with pytest.raises(Unsavable, match=said):
            pack([tensor])
        with pytest.raises(Unsavable, match=said):
            digest(tensor)


def test_a_dtype_of_torch_arrives_as_numpy_s() -> None:
    for name in ("float32", "bfloat16", "bool", "float8_e4m3fn", "int64"):
        dtype = getattr(torch, name)
        assert unpack(pack(dtype)) == dtype_of(name)
        assert digest(dtype) == digest(dtype_of(name))
        assert to_tensors(unpack(pack([dtype])), torch.device("cpu")) == [dtype]
    assert unpack(pack(np.dtype(">i4"))) == np.dtype("int32")


def test_array_of_refuses_what_is_no_array() -> None:
    assert is_array(np.float64(1))
    assert not is_array(np.str_("x"))
    assert not is_array([1])
    with pytest.raises(Unsavable, match="list"):
        array_of([1])


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 300)])
def test_a_payload_is_taken_apart_again(name: str, shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, extra_dtypes().get(name) or np.dtype(name))
    dtype, found, raw = payload_parts(array_payload(name, shape, raw_bytes(array)))
    assert (dtype, found, bytes(raw)) == (name, shape, array.tobytes())
