"""Encodes values (variables of a block, live parameters, saves) in msgpack, and decodes them.

A *value* is a tree of plain Python data and arrays: None, bool, int, float, complex, str, bytes, dtypes, arrays, and
lists, tuples, dicts, sets and frozensets of these. A dict's keys and a set's items are plain data, with integers of at
most 64 bits, or tuples of such (`kinds.py`). Types that msgpack lacks are encoded as extensions. Nothing is pickled, so
that decoding a value never runs code of its sender.

A large array can be sent as an `ArrayRef` instead: its dtype, shape and digest, and the name of its blob (`refs.py`).

A sender may use arrays of NumPy (including `ml_dtypes`) or torch, of any device, strides and byte order. A receiver
gets read-only NumPy arrays that share memory with the buffer they were decoded from (`arrays.py`), possibly unaligned.
A caller that keeps a small array of a large message keeps the whole buffer: copy the array. A dtype of torch becomes
the dtype of NumPy (or `ml_dtypes`) of the same name.
"""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    import numpy as np
from .arrays import array_of, array_payload, decode_array, extra_dtypes, raw_bytes
from .kinds import (
    INT_MAX,
    INT_MIN,
    MAX_DEPTH,
    Path,
    Unsavable,
    dtype_name,
    kind_or_none,
    path_key,
    plain_list_decoder,
    plain_text,
    refuse_depth,
    refuse_type,
    set_members,
)
from .refs import (
    ARRAY,
    COMPLEX,
    DTYPE,
    DTYPES,
    FROZENSET,
    INT,
    REF,
    SET,
    TUPLE,
    ArrayRef,
    Loader,
    current_loader,
    encode_ref,
    loading_by,
    ref_decoder,
)

__all__ = ["Decode", "complex_struct", "decoder", "encode_key", "encode_tuple", "int_bytes", "pack", "unpack", "wire"]

complex_struct = struct.Struct("<dd")


def encode_key(key: Any) -> Any:
    """A key that `path_key` returned, encoded for a delta's path. Without this a tuple would be decoded as a list."""
    return wire(key) if type(key) is tuple else key


_encoder = msgspec.msgpack.Encoder()


def pack(value: Any) -> bytes:
    """Encode a value in msgpack.

    Raises:
        Unsavable: `value`, or a part of it, cannot travel; the error names the part.
    """
    return _encoder.encode(wire(value))


def wire(value: Any, path: Path = ()) -> Any:
    """Convert a value to plain data and `msgspec.msgpack.Ext`, for a field of a message. The result is a deep copy.

    Args:
        value: the value.
        path: where `value` stands in a larger value; errors name it, and it counts towards the depth limit.

    Raises:
        Unsavable: `value`, or a part of it, cannot travel; the error names the part.
    """
    plain = type(value)
    if plain is float or plain is bool or value is None or plain is bytes:
        return value
    if plain is int and INT_MIN <= value <= INT_MAX:
        return value
    match kind_or_none(value):
        case "array":
            if isinstance(value, ArrayRef):
                return encode_ref(value)
            array = array_of(value, path)
            return msgspec.msgpack.Ext(ARRAY, array_payload(array.dtype.name, array.shape, raw_bytes(array)))
        case "str":
            return plain_text(value, path)
        case "list":
            if len(path) >= MAX_DEPTH:
                refuse_depth(path)
            return [wire(item, (*path, index)) for index, item in enumerate(value)]
        case "dict":
            if len(path) >= MAX_DEPTH:
                refuse_depth(path)
            return {path_key(key, path): wire(item, (*path, key)) for key, item in dict.items(value)}
        case "tuple":
            if len(path) >= MAX_DEPTH:
                refuse_depth(path)
            return encode_tuple([wire(item, (*path, index)) for index, item in enumerate(value)])
        case "int":
            number = int.__index__(value)
            if INT_MIN <= number <= INT_MAX:
                return number
            return msgspec.msgpack.Ext(INT, int_bytes(number))
        case "float":
            return float.__float__(value)
        case "complex":
            return msgspec.msgpack.Ext(COMPLEX, complex_struct.pack(value.real, value.imag))
        case "bytes":
            return bytes(memoryview(value))
        case "set" | "frozenset" as found:
            # Sorted, so that equal sets have equal encodings.
            items = sorted(_encoder.encode(item) for item in set_members(value, path))
            packed = _encoder.encode([msgspec.Raw(item) for item in items])
            return msgspec.msgpack.Ext(SET if found == "set" else FROZENSET, packed)
        case "dtype":
            return msgspec.msgpack.Ext(DTYPE, dtype_name(value, path).encode())
    refuse_type(value, path)


def encode_tuple(items: list[Any]) -> Any:
    """A tuple's msgpack extension, from its items as `wire` returns them."""
    return msgspec.msgpack.Ext(TUPLE, _encoder.encode(items))


def int_bytes(number: int) -> bytes:
    """An integer of any size as little-endian two's complement."""
    return number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)


class _OtherExtension(Exception):
    """The data that `_array_hook` helps to decode has an extension other than an array."""


class _TupleDepth(threading.local):
    """How deep the tuples that this thread is decoding nest."""

    depth = 0


_tuple_depth = _TupleDepth()

#: Decodes an extension to an unhashable object, and so raises for a map with an extension as a key.
_without_hook = msgspec.msgpack.Decoder()


def _array_hook(code: int, payload: memoryview) -> Any:
    """Decodes arrays, the only extension in nearly all messages."""
    if code == ARRAY:
        return decode_array(payload)
    raise _OtherExtension


def _ext_hook(code: int, payload: memoryview) -> Any:
    """Decodes all extensions."""
    if code == ARRAY:
        return decode_array(payload)
    if code == TUPLE:
        if _tuple_depth.depth >= MAX_DEPTH:
            raise ValueError(f"tuples nest deeper than {MAX_DEPTH}")
        _tuple_depth.depth += 1
        try:
            return tuple(_list_decoder(payload, current_loader.get()))
        finally:
            _tuple_depth.depth -= 1
    if code == INT:
        return int.from_bytes(payload, "little", signed=True)
    if code == COMPLEX:
        if len(payload) != complex_struct.size:
            raise ValueError(f"a complex number takes {complex_struct.size} bytes, got {len(payload)}")
        return complex(*complex_struct.unpack(payload))
    if code in (SET, FROZENSET):
        return _set_from(payload) if code == SET else frozenset(_set_from(payload))
    if code == DTYPE:
        return _dtype_from(str(payload, "ascii"))
    if code == REF:
        return ArrayRef(*ref_decoder.decode(payload), load=current_loader.get())
    raise ValueError(f"unknown extension type {code}")


def _set_from(payload: memoryview) -> set[Any]:
    try:
        return set_members((_list_to_tuple(item) for item in plain_list_decoder.decode(payload)), ())
    except Unsavable as error:
        raise ValueError(f"a set has an item that it cannot have: {error}") from None


def _list_to_tuple(item: Any) -> Any:
    """An item of a set. Tuples in sets are encoded as msgpack arrays, which decode to lists."""
    return tuple([_list_to_tuple(one) for one in item]) if type(item) is list else item


def _dtype_from(name: str) -> np.dtype[Any]:
    import numpy as np

    if name not in DTYPES:
        raise ValueError(f"an unknown dtype {name[:40]!r}")
    return extra_dtypes().get(name) or np.dtype(name)


class Decode(Protocol):
    """A function that `decoder` returns."""

    def __call__(self, data: bytes | memoryview, loader: Loader | None = None, /) -> Any:
        """Decode a message. References to large arrays in it get `loader` for their `load`."""


def decoder(type_: Any = Any, *, plain: bool = False) -> Decode:
    """A function that decodes messages of type `type_` with values in them, from `bytes` or a `memoryview`.

    With `plain`, extensions stay encoded, as `msgspec.msgpack.Ext`. The function raises only `msgspec.DecodeError` (a
    `ValueError`): for data that is cut short, has another type, nests too deep, has a malformed value, or has a map
    with an extension as a key.
    """
    decode = msgspec.msgpack.Decoder(type_, ext_hook=None if plain else _array_hook).decode
    decode_all = msgspec.msgpack.Decoder(type_, ext_hook=_ext_hook).decode

    def decoded(data: bytes | memoryview, loader: Loader | None = None) -> Any:
        try:
            try:
                return decode(data)
            except _OtherExtension:
                # Python's hashes of large integers, complex numbers and tuples are predictable. An attacker could build
                # a map with colliding keys, which takes time quadratic in its size. This call refuses such keys.
                _without_hook.decode(data)
                with loading_by(loader):
                    return decode_all(data)
        except msgspec.MsgspecError:
            raise
        except RecursionError:
            raise msgspec.DecodeError("the message nests too deep to be decoded") from None
        except (ValueError, TypeError, ArithmeticError, LookupError, MemoryError) as error:
            # A hook raised, or a map has an unhashable key.
            raise msgspec.DecodeError(f"the message holds a malformed value: {error}") from error

    return decoded


_decoder = decoder()

_list_decoder = decoder(list[Any])


def unpack(data: bytes | memoryview) -> Any:
    """Decode a value that `pack` encoded. Arrays in it share memory with `data`.

    Raises:
        msgspec.DecodeError: (a `ValueError`) `data` is not a packed value.
    """
    return _decoder(data)
