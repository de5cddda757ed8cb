"""Interventions that were normalized before, so that a client which submits them again does not do so again.

A service brings the same objects with trace after trace, or makes new ones of the same arrays. A normal form counts for
an object with the same fields, while the arrays have the same elements: a caller may change either between two traces.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from operator import is_
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from tracewire_bus.wire.messages import Declared

__all__ = ["SIMPLE", "NormalForms"]

#: The most bytes of an intervention's arrays with their encoded forms, and of all that are kept; and how many
#: interventions are.
_LONGEST: Final = 1 << 20
_MOST_BYTES: Final = 32 << 20
_MOST: Final = 4096
#: The types of fields whose equal values are of equal types, and are compared by value.
SIMPLE: Final = frozenset({str, int, float, bool, type(None)})


class _Array(NamedTuple):
    """An array as it was: its place among the fields, its dtype and shape, and its encoded form."""

    place: int
    dtype: Any
    shape: tuple[int, ...]
    payload: bytes


class _Kept(NamedTuple):
    """A normal form with what it was made of; the bytes of its encoded arrays; and what its arrays are parts of.

    `key` is equal for objects whose fields are.
    """

    one: Any
    key: tuple[Any, ...]
    values: tuple[Any, ...]
    arrays: tuple[_Array, ...]
    plain: Declared
    size: int
    wholes: tuple[Any, ...]


def _alike(one: Any, other: Any) -> bool:
    """Whether a field is as it was, the elements of arrays apart."""
    if one is other:
        return True
    return type(one) is type(other) and type(one) in SIMPLE and bool(one == other)


class NormalForms:
    """The normal forms of the interventions that were normalized last."""

    def __init__(self) -> None:
        #: By the `id` of the caller's object, which is kept, so that no other has its `id`. The oldest use first.
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        #: By the `key` of each: the `id` of the object that was kept last.
        self._ids: dict[tuple[Any, ...], int] = {}
        self._bytes = 0
        #: By the `id` of an array that is kept whole: how many of the kept interventions have it, or a part of it.
        self._sharing: dict[int, int] = {}
        #: Clients of several threads use one.
        self._lock = threading.Lock()

    def get(self, interventions: Iterable[Any]) -> list[Declared | None]:
        """The normal form of each intervention; `None` where it is not known, or where the intervention has changed."""
        pairs = []
        with self._lock:
            for one in interventions:
                number = id(one)
                kept = self._kept.get(number)
                if kept is None and (key := _key_of(one)) is not None and (found := self._ids.get(key)) is not None:
                    number, kept = found, self._kept[found]
                if kept is not None:
                    self._kept.move_to_end(number)
                pairs.append((one, kept))
        #: Arrays that were compared with an encoded form. Several interventions may have one.
        compared: set[tuple[int, int]] = set()
        return [None if kept is None or not _unchanged(one, kept, compared) else kept.plain for one, kept in pairs]

    def keep(self, one: Any, plain: Declared) -> None:
        """Keep a normal form, if all that it was made of can be compared."""
        import numpy as np

        key = _key_of(one)
        if key is None:
            return
        values, arrays, wholes, size = msgspec.structs.astuple(one), [], [], 0
        for place, (name, value) in enumerate(zip(one.__struct_fields__, values, strict=True)):
            encoded = getattr(plain, name)
            if type(value) is np.ndarray and type(encoded) is msgspec.msgpack.Ext and type(encoded.data) is bytes:
                arrays.append(_Array(place, value.dtype, value.shape, self._payload(value, encoded.data)))
                # A view keeps all of the array alive of which it is a part.
                wholes.append(value if value.base is None else value.base)
                size += len(encoded.data)
            elif type(value) not in SIMPLE:
                return
        if size + sum(map(_bytes_of, wholes)) > _LONGEST:
            return
        with self._lock:
            self._drop(id(one))
            self._kept[id(one)] = _Kept(one, key, values, tuple(arrays), plain, size, tuple(wholes))
            self._ids[key] = id(one)
            self._bytes += size
            for whole in wholes:
                sharing = self._sharing[id(whole)] = self._sharing.get(id(whole), 0) + 1
                self._bytes += _bytes_of(whole) if sharing == 1 else 0
            while self._bytes > _MOST_BYTES or len(self._kept) > _MOST:
                self._drop(next(iter(self._kept)))

    def _payload(self, array: Any, payload: bytes) -> bytes:
        """An array's encoded form: that of the intervention that was kept last, if it has the same array."""
        with self._lock:
            last = next(reversed(self._kept.values()), None)
        for known in last.arrays if last is not None else ():
            if last is not None and last.values[known.place] is array and known.payload == payload:
                return known.payload
        return payload

    def _drop(self, key: int) -> None:
        kept = self._kept.pop(key, None)
        if kept is None:
            return
        if self._ids.get(kept.key) == key:
            del self._ids[kept.key]
        self._bytes -= kept.size
        for whole in kept.wholes:
            self._sharing[id(whole)] -= 1
            if not self._sharing[id(whole)]:
                del self._sharing[id(whole)]
                self._bytes -= _bytes_of(whole)


def _bytes_of(whole: Any) -> int:
    """The bytes of an array, or of another owner of memory, which does not say how many it has."""
    return int(getattr(whole, "nbytes", _LONGEST))


def _key_of(one: Any) -> tuple[Any, ...] | None:
    """Equal for objects that have equal fields and the very same arrays; `None` if it has none, or others."""
    values = msgspec.structs.astuple(one) if isinstance(one, msgspec.Struct) else ()
    types = tuple(map(type, values))
    if [kind.__name__ for kind in set(types) - SIMPLE] != ["ndarray"]:
        return None
    # Numbers of different types can be equal.
    return type(one), types, *[value if type(value) in SIMPLE else id(value) for value in values]


def _unchanged(one: Any, kept: _Kept, compared: set[tuple[int, int]]) -> bool:
    values = msgspec.structs.astuple(one)
    if not all(map(is_, values, kept.values)) and not all(map(_alike, values, kept.values)):
        return False
    for array in kept.arrays:
        value = values[array.place]
        pair = id(value), id(array.payload)
        if pair not in compared:
            if not _same(value, array):
                return False
            compared.add(pair)
    return True


def _same(array: Any, known: _Array) -> bool:
    """Whether an array has the dtype, the shape and the elements that it had. The elements end its encoded form."""
    return bool(array.shape == known.shape and array.dtype == known.dtype and known.payload.endswith(array.tobytes()))
