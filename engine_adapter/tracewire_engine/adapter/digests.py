"""Digests of the saves of blocks, taken of the encoded deltas on their way from the workers to the bus.

The workers send saves encoded, and most saves are lists of arrays. The adapter takes the digests of these lists for the
final's manifest, so that the workers need not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import msgspec

from tracewire_bus.wire.digests import encoded_digest, list_digest
from tracewire_bus.wire.messages import Manifest, PathKey

__all__ = ["EncodedDelta", "PassingDigests", "split_by_edit"]


class _Append(msgspec.Struct, array_like=True, tag="a"):
    path: tuple[PathKey, ...]
    items: list[msgspec.Raw]


class _Set(msgspec.Struct, array_like=True, tag="s"):
    path: tuple[PathKey, ...]
    value: msgspec.Raw


class _Delete(msgspec.Struct, array_like=True, tag="d"):
    path: tuple[PathKey, ...]


EncodedDelta: TypeAlias = _Append | _Set | _Delete
"""A delta whose values are still encoded."""


_deltas = msgspec.msgpack.Decoder(list[EncodedDelta])


_items = msgspec.msgpack.Decoder(list[msgspec.Raw])


class PassingDigests:
    """Digests of one choice's saved lists of arrays, taken of its encoded deltas as they pass, in order."""

    def __init__(self) -> None:
        #: The digests of the items, by name; `None` for an item that is no array.
        self._known: dict[Any, list[bytes | None]] = {}

    def take(self, raw: bytes | memoryview) -> None:
        """Take an encoded `list[Delta]`."""
        for delta in _deltas.decode(raw):
            name = delta.path[0]
            known = self._known.get(name)
            if len(delta.path) == 1:
                if isinstance(delta, _Append):
                    if known is not None:
                        known.extend([encoded_digest(memoryview(item)) for item in delta.items])
                elif isinstance(delta, _Set) and _is_list(memoryview(delta.value)):
                    self._known[name] = [encoded_digest(memoryview(item)) for item in _items.decode(delta.value)]
                else:
                    self._known.pop(name, None)
            elif known is not None:
                place = delta.path[1]
                if type(place) is int and 0 <= place < len(known):
                    known[place] = None
                    if isinstance(delta, _Set) and len(delta.path) == 2:
                        known[place] = encoded_digest(memoryview(delta.value))

    def of(self, name: str) -> bytes:
        """The current digest of the list `name`; empty if `name` is not a list of arrays."""
        known = self._known.get(name)
        digests = [found for found in known or () if found is not None]
        return list_digest(digests) if known is not None and len(digests) == len(known) else b""

    def complete(self, raw: bytes | memoryview, manifest: Sequence[Manifest]) -> None:
        """Take the finish record's encoded `list[Delta]`, and fill in the digests that its manifest lacks."""
        self.take(raw)
        for entry in manifest:
            entry.digest = entry.digest or self.of(entry.name)


def _is_list(raw: memoryview) -> bool:
    return raw[0] & 0xF0 == 0x90 or raw[0] in (0xDC, 0xDD)


def split_by_edit(raws: Iterable[msgspec.Raw]) -> dict[str, list[EncodedDelta]]:
    """The deltas of encoded lists, by the name of the edit that saved them. Their paths begin with the save's own name.

    Deltas of the request's own block, whose names have no edit before a slash, are left out.
    """
    found: dict[str, list[EncodedDelta]] = {}
    for raw in raws:
        for delta in _deltas.decode(raw):
            edit, slash, name = str(delta.path[0]).partition("/")
            if slash:
                delta.path = (name, *delta.path[1:])
                found.setdefault(edit, []).append(delta)
    return found
