"""Digests of values: a consumer compares them to check that its folded values equal those on the engine.

A digest is 16 bytes of XXH3, over a tag of the value's kind and its content. Digests show loss and damage; they do not
show who wrote a value.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import msgspec
import xxhash

from .arrays import EXT_STARTS, array_of, dtype_names, payload_header, raw_bytes
from .kinds import (
    MAX_DEPTH,
    Path,
    dtype_name,
    kind_or_none,
    path_key,
    plain_text,
    refuse_depth,
    refuse_type,
    set_members,
)
from .packing import complex_struct, int_bytes
from .refs import ARRAY, ArrayRef

__all__ = [
    "array_digest",
    "array_hash",
    "content_hash",
    "dict_digest",
    "digest",
    "encoded_digest",
    "former_digest",
    "list_digest",
]

_float = struct.Struct("<d")


def digest(value: Any) -> bytes:
    """The digest of a value: 16 bytes, equal for two values only if kind, structure, dtype, shape and every bit agree.

    A tensor and the NumPy array that a consumer receives for it have the same digest, as has an `ArrayRef` to it.
    `1`, `1.0` and `True` differ, as do a list and a tuple, `0.0` and `-0.0`, and NaNs of different bits. The order of
    a dict's entries does not matter. Keys of dicts are compared as Python compares them: `1`, `1.0` and `True` are the
    same key.

    Raises:
        Unsavable: `value`, or a part of it, cannot travel; the error names the part.
    """
    return _digest(value, ())


_Hash: TypeAlias = Callable[..., bytes]


def _hash(tag: bytes, *parts: bytes | memoryview) -> bytes:
    state = xxhash.xxh3_128(tag)
    for part in parts:
        state.update(part)
    return state.digest()


def _blake2b(tag: bytes, *parts: bytes | memoryview) -> bytes:
    state = hashlib.blake2b(tag, digest_size=16)
    for part in parts:
        state.update(part)
    return state.digest()


def former_digest(value: Any) -> bytes:
    """The digest that schemas before 2.0 have for a value: BLAKE2b in place of XXH3.

    Raises:
        Unsavable: a part of `value` cannot travel; the error names the part.
    """
    return _digest(value, (), _blake2b)


def _digest(value: Any, path: Path, hash_: _Hash = _hash) -> bytes:
    found = kind_or_none(value)
    if found in ("list", "tuple", "dict") and len(path) >= MAX_DEPTH:
        refuse_depth(path)
    match found:
        case "none":
            return hash_(b"n")
        case "bool":
            return hash_(b"b", b"\1" if value else b"\0")
        case "int":
            return hash_(b"i", int_bytes(int.__index__(value)))
        case "float":
            return hash_(b"f", _float.pack(value))
        case "complex":
            return hash_(b"c", complex_struct.pack(value.real, value.imag))
        case "str":
            return hash_(b"s", plain_text(value, path).encode())
        case "bytes":
            return hash_(b"y", value)
        case "array":
            if isinstance(value, ArrayRef):
                return value.digest
            array = array_of(value, path)
            name = dtype_names.get(array.dtype) or dtype_names.setdefault(array.dtype, array.dtype.name)
            return hash_(b"a", payload_header(name, array.shape)[2:], raw_bytes(array))
        case "list" | "tuple":
            items = (_digest(item, (*path, index), hash_) for index, item in enumerate(value))
            return hash_(b"l" if found == "list" else b"t", *items)
        case "dict":
            pairs = (
                _key_digest(path_key(key, path), hash_) + _digest(item, (*path, key), hash_)
                for key, item in dict.items(value)
            )
            return hash_(b"d", *sorted(pairs))
        case "set" | "frozenset":
            members = sorted(_key_digest(item, hash_) for item in set_members(value, path))
            return hash_(b"S" if found == "set" else b"F", *members)
        case "dtype":
            return hash_(b"D", dtype_name(value, path).encode())
    refuse_type(value, path)


def _key_digest(key: Any, hash_: _Hash = _hash) -> bytes:
    # Python looks up 1, 1.0 and True as one key, so two folds of one dict may hold different ones of them.
    if isinstance(key, (bool, float)) and not (isinstance(key, float) and not key.is_integer()):
        key = int(key)
    if type(key) is tuple:
        return hash_(b"t", *(_key_digest(item, hash_) for item in key))
    return _digest(key, (), hash_)


def encoded_digest(raw: bytes | memoryview) -> bytes | None:
    """The digest of an array from its encoded form (a msgpack extension); `None` if `raw` encodes anything else."""
    start = EXT_STARTS.get(raw[0])
    if start is None or raw[start - 1] != ARRAY:
        return None
    return _hash(b"a", memoryview(raw)[start + 2 :])


def array_digest(head: bytes, raw: bytes | memoryview) -> bytes:
    """The digest of an array.

    Args:
        head: the array's header, the second item that `array_header` returns.
        raw: the array's elements, little-endian and in C order.
    """
    return _hash(b"a", head, raw)


def array_hash(dtype: str, shape: tuple[int, ...]) -> xxhash.xxh3_128:
    """An XXH3 state to update with an array's little-endian elements, in pieces; its digest is then the array's."""
    state = xxhash.xxh3_128(b"a")
    state.update(msgspec.msgpack.encode((dtype, shape)))
    return state


def content_hash(dtype: str, shape: tuple[int, ...]) -> hashlib.blake2b:
    """The same for BLAKE2b, for arrays that traces share by their digest: nobody can make two arrays that collide."""
    state = hashlib.blake2b(b"a", digest_size=16)
    state.update(msgspec.msgpack.encode((dtype, shape)))
    return state


def list_digest(items: Iterable[bytes]) -> bytes:
    """The digest of a list, from the digests of its items in order."""
    return _hash(b"l", *items)


def dict_digest(items: Iterable[tuple[Any, bytes]]) -> bytes:
    """The digest of a dict, from pairs of a key and the digest of that key's value, in any order."""
    return _hash(b"d", *sorted(_key_digest(path_key(key)) + value for key, value in items))
