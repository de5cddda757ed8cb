"""Values that travel: variables of a block, live parameters, saves.

A *value* is a tree of plain Python data and arrays: None, bool, int, float, complex, str, bytes, dtypes, arrays, and
lists, tuples, dicts, sets and frozensets of these. Keys of dicts and items of sets are plain data of at most 64 bits,
and tuples of it (`kinds.py`). A value is packed in msgpack; what msgpack has no type for travels in extension types.
Nothing is pickled, so that decoding a value from a stranger runs no code of theirs.

A large array may travel as an `ArrayRef` instead: its dtype, shape and digest, and the name of its blob (`refs.py`).

Arrays come from NumPy (`ml_dtypes` included) or torch, whatever their device, strides and byte order, and always
arrive as read-only NumPy arrays that share memory with the buffer they were decoded from (`arrays.py`). A caller that
keeps a small array of a large message keeps the message: copy the array. The data need not be aligned in memory. A
dtype of torch arrives as the dtype of NumPy (or `ml_dtypes`) of the same name.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import numpy as np
from .arrays import array_at, array_from, extra_dtypes, packed_array
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
    current_loader,
    ref_fields,
    wired_ref,
)

__all__ = ["complex_struct", "decoder", "int_bytes", "pack", "unpack", "wire", "wired_key", "wired_tuple"]

complex_struct = struct.Struct("<dd")


def wired_key(key: Any) -> Any:
    """A key of `path_key` as it stands in a delta's path: a tuple would be read as a list there."""
    return wire(key) if type(key) is tuple else key


_encoder = msgspec.msgpack.Encoder()


def pack(value: Any) -> bytes:
    """`value` in msgpack.

    Raises:
        Unsavable: naming the part of it that cannot travel.
    """
    return _encoder.encode(wire(value))


def wire(value: Any, path: Path = ()) -> Any:
    """`value` prepared to stand in a message: of natives and msgspec extensions only, sharing nothing that can change.

    `path` is where the value stands already, for errors to name and for depth to count.

    Raises:
        Unsavable: naming the part of it that cannot travel.
    """
    plain = type(value)
    if plain is float or plain is bool or value is None or plain is bytes:
        return value
    if plain is int and INT_MIN <= value <= INT_MAX:
        return value
    match kind_or_none(value):
        case "array":
            if isinstance(value, ArrayRef):
                return wired_ref(value)
            return msgspec.msgpack.Ext(ARRAY, packed_array(array_at(value, path)))
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
            return wired_tuple([wire(item, (*path, index)) for index, item in enumerate(value)])
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
            # In an order of their own: equal sets are equal on the wire.
            items = sorted(_encoder.encode(item) for item in set_members(value, path))
            packed = _encoder.encode([msgspec.Raw(item) for item in items])
            return msgspec.msgpack.Ext(SET if found == "set" else FROZENSET, packed)
        case "dtype":
            return msgspec.msgpack.Ext(DTYPE, dtype_name(value, path).encode())
    refuse_type(value, path)


def wired_tuple(items: list[Any]) -> Any:
    """A tuple as `wire` would have it, from its items as `wire` has them."""
    return msgspec.msgpack.Ext(TUPLE, _encoder.encode(items))


def int_bytes(number: int) -> bytes:
    return number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)


class _NotPlain(Exception):
    """What is decoded holds more than plain data and arrays."""


class _Decoding(threading.local):
    """How many tuples stand in each other, of what this thread decodes at the moment."""

    depth = 0


_decoding = _Decoding()

#: Without a hook an extension decodes to an object that no map takes as a key.
_without_hook = msgspec.msgpack.Decoder()


def _array_hook(code: int, payload: memoryview) -> Any:
    """Decodes arrays, which are what nearly all messages have beside plain data."""
    if code == ARRAY:
        return array_from(payload)
    raise _NotPlain


def _ext_hook(code: int, payload: memoryview) -> Any:
    """Decodes what msgpack has no type for."""
    if code == ARRAY:
        return array_from(payload)
    if code == TUPLE:
        if _decoding.depth >= MAX_DEPTH:
            raise ValueError(f"tuples nest deeper than {MAX_DEPTH}")
        _decoding.depth += 1
        try:
            return tuple(_list_decoder(payload))
        finally:
            _decoding.depth -= 1
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
        return ArrayRef(*ref_fields.decode(payload), load=current_loader.get())
    raise ValueError(f"unknown extension type {code}")


def _set_from(payload: memoryview) -> set[Any]:
    try:
        return set_members((_opened(item) for item in plain_list_decoder.decode(payload)), ())
    except Unsavable as error:
        raise ValueError(f"a set holds what it cannot: {error}") from None


def _opened(item: Any) -> Any:
    """A tuple of a set travels as an array does, since no item of a set is a list."""
    return tuple([_opened(one) for one in item]) if type(item) is list else item


def _dtype_from(name: str) -> np.dtype[Any]:
    import numpy as np

    if name not in DTYPES:
        raise ValueError(f"an unknown dtype {name[:40]!r}")
    return extra_dtypes().get(name) or np.dtype(name)


def decoder(type_: Any = Any, *, plain: bool = False) -> Callable[[bytes | memoryview], Any]:
    """What decodes messages of this type that carry values: a function of the encoded message. With `plain`, what
    msgpack has no type for stays encoded.

    The function raises `msgspec.DecodeError` (a `ValueError`), and nothing else, where the data is no such message:
    where it is cut short, nests too deep, holds a malformed value, or has a map with an extension as a key.
    """
    decode = msgspec.msgpack.Decoder(type_, ext_hook=None if plain else _array_hook).decode
    decode_all = msgspec.msgpack.Decoder(type_, ext_hook=_ext_hook).decode

    def decoded(data: bytes | memoryview) -> Any:
        try:
            try:
                return decode(data)
            except _NotPlain:
                # Python hashes integers, complex numbers and tuples of them in a known way: a map that has them as
                # keys can be made to take time that grows with the square of its size. This refuses them as keys.
                _without_hook.decode(data)
                return decode_all(data)
        except msgspec.MsgspecError:
            raise
        except RecursionError:
            raise msgspec.DecodeError("the message nests too deep to be decoded") from None
        except (ValueError, TypeError, ArithmeticError, LookupError, MemoryError) as error:
            # From a hook, or a map whose keys cannot be hashed.
            raise msgspec.DecodeError(f"the message holds a malformed value: {error}") from error

    return decoded


_decoder = decoder()

_list_decoder = decoder(list[Any])


def unpack(data: bytes | memoryview) -> Any:
    """The value that `pack` made `data` of. Its arrays share memory with `data`.

    Raises:
        msgspec.DecodeError: (a `ValueError`) `data` is no packed value.
    """
    return _decoder(data)
