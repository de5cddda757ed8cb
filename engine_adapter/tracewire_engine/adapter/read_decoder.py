"""Decodes the reads of declared interventions: from the bytes of a step to the deltas of each trace.

The workers send one buffer a step for all requests, and once a `Layout` that assigns the bytes to requests. This module
makes encoded deltas of the bytes. All of a delta but its values is the same from step to step, and is prepared once.
The module also takes the digests for the final's manifest, and checks stop conditions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from tracewire_bus.store.blobs import CHUNK_BYTES, Blobs, new_blob
from tracewire_bus.wire.arrays import array_head
from tracewire_bus.wire.digests import array_digest, dict_digest, digest, list_digest
from tracewire_bus.wire.messages import Append, Manifest, Set, StopWhen
from tracewire_bus.wire.packing import wire
from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.protocol.messages import Batch, Layout, LayoutEntry, Part, Slot

__all__ = ["ChoiceReads", "Item", "ReadDecoder", "Strings", "extend_encoded_list"]

_encoder = msgspec.msgpack.Encoder()
#: Finds the strings of tokens by their ids.
Strings: TypeAlias = Callable[[list[int]], list[str]]
#: The key of a logit lens's strings, encoded.
_STRINGS = _encoder.encode("token_strings")
_HOLE = b"\xc4\x10" + bytes(range(200, 216))
_number = struct.Struct("<f")
_wire_number = struct.Struct(">Bf")


def _encode_frame(delta: Append | Set) -> tuple[bytes, bytes]:
    """An encoded delta before and after its one item."""
    before, _, after = _encoder.encode(delta).partition(_HOLE)
    return before, after


class Item:
    """Makes the item that one saved name gains in a step, of a batch's bytes."""

    __slots__ = ("append", "name", "parts", "shell", "slot", "start", "threshold")

    def __init__(self, slot: Slot, threshold: int = 0) -> None:
        self.slot = slot
        #: Arrays of more bytes become blobs; 0: no array does.
        self.threshold = threshold
        self.name = slot.name
        self.append = _encode_frame(Append(path=(slot.name,), items=[msgspec.Raw(_HOLE)]))
        self.start = _encode_frame(Set(path=(slot.name,), value=[msgspec.Raw(_HOLE)]))
        self.parts = [(part, *_heads(part)) for part in slot.parts]
        #: The encoded prefix of each part: empty, or a dict's header and keys.
        keys = [_encoder.encode(part.key) if part.key else b"" for part in slot.parts]
        if slot.parts[0].key:
            keys[0] = bytes([0x80 | len(keys)]) + keys[0]
        self.shell = keys

    def take(
        self, data: memoryview, blobs: list[tuple[str, bytes]], strings: Strings | None = None
    ) -> tuple[bytes, bytes, Sequence[float]]:
        """The encoded item, its digest, and its numbers if a stop condition can check them (else empty).

        Adds large arrays to `blobs`, and refers to them in the item. `strings` finds the strings of token ids, which
        the item of a logit lens then has too.
        """
        pieces: list[bytes | memoryview] = []
        digests: list[bytes] = []
        texts: Any = None
        numbers: Sequence[float] = ()
        for (part, head, digest_head), before in zip(self.parts, self.shell, strict=True):
            raw = data[part.offset : part.offset + part.size]
            if before:
                pieces.append(before)
            if strings is not None and part.key == "token_ids":
                texts = _reshape(strings(list(memoryview(raw).cast("i"))), part.shape)
            if not head:
                (value,) = _number.unpack(raw)
                pieces.append(_wire_number.pack(0xCA, value))
                digests.append(digest(value))
                numbers = (value,)
            elif self.threshold and part.size > self.threshold:
                taken = ArrayRef(part.dtype, part.shape, array_digest(digest_head, raw), new_blob(), self.name)
                pieces.append(_encoder.encode(wire(taken)))
                digests.append(taken.digest)
                blobs.append((taken.blob, bytes(raw)))
            else:
                pieces += (head, raw)
                digests.append(array_digest(digest_head, raw))
                if part.dtype == "float32" and len(part.shape) == 1 and not part.key:
                    numbers = memoryview(raw).cast("f")
        if self.slot.parts[0].key:
            items = [(part.key, own) for part, own in zip(self.slot.parts, digests, strict=True)]
            if texts is not None:
                # The strings are one key more than the header counts.
                pieces[0] = bytes([pieces[0][0] + 1, *pieces[0][1:]])
                pieces += (_STRINGS, _encoder.encode(texts))
                items.append(("token_strings", digest(texts)))
            found = dict_digest(items)
        else:
            found = digests[0]
        return b"".join(pieces), found, numbers


def _reshape(flat: list[str], shape: tuple[int, ...]) -> Any:
    """Nested lists of the items of `flat`, of this shape."""
    for size in shape[:0:-1]:
        flat = [flat[start : start + size] for start in range(0, len(flat), size)]  # type: ignore[misc]
    return flat


def _heads(part: Part) -> tuple[bytes, bytes]:
    """The header of an array on the wire and in its digest; empty for a single number."""
    if not part.shape and part.dtype == "float32":
        return b"", b""
    return array_head(part.dtype, part.shape, part.size)


class ChoiceReads:
    """The reads of declared interventions for one choice, by the index of the step's token."""

    def __init__(self, stops: Sequence[StopWhen] = ()) -> None:
        #: Finds the strings of token ids, which the items of logit lenses then have too.
        self.strings: Strings | None = None
        self.steps: dict[int, list[bytes]] = {}
        #: Large arrays, by the name of their blob. The bus must have them before the deltas that refer to them.
        self.blobs: list[tuple[str, bytes]] = []
        self._started: set[str] = set()
        self._digests: dict[int, list[tuple[str, bytes]]] = {}
        self._stops = list(stops)
        self._streaks = [0] * len(self._stops)
        #: The first stop condition that was met, and the token index at which it was met.
        self.stopped: StopWhen | None = None
        self.stopped_at: int | None = None

    def take(self, index: int, items: Sequence[Item], data: memoryview) -> None:
        """Take the reads of the step that sampled token `index`; none behind a stop."""
        if self.stopped_at is not None and index > self.stopped_at:
            return
        deltas: list[bytes] = []
        digests: list[tuple[str, bytes]] = []
        numbers: dict[str, Sequence[float]] = {}
        for item in items:
            encoded, found, values = item.take(data, self.blobs, self.strings)
            if item.name in self._started:
                before, after = item.append
            else:
                self._started.add(item.name)
                before, after = item.start
            deltas.append(before + encoded + after)
            digests.append((item.name, found))
            numbers[item.name] = values
        self.steps[index] = deltas
        if digests:
            self._digests[index] = digests
        if self._stops:
            self._check_stops(index, numbers)

    def set_stops(self, stops: Sequence[StopWhen]) -> None:
        """Take the same stop conditions with other thresholds, for later reads."""
        self._stops = list(stops)

    def _check_stops(self, index: int, numbers: Mapping[str, Sequence[float]]) -> None:
        for place, stop in enumerate(self._stops):
            values = numbers.get(stop.probe, ())
            if stop.output >= len(values):
                continue
            value = values[stop.output]
            over = isinstance(stop.above, (int, float)) and value > stop.above
            under = isinstance(stop.below, (int, float)) and value < stop.below
            self._streaks[place] = self._streaks[place] + 1 if over or under else 0
            if self._streaks[place] >= stop.steps and self.stopped is None:
                self.stopped, self.stopped_at = stop, index

    async def upload(self, blobs: Blobs, owner: str) -> bool:
        """Upload large arrays to the bus, as blobs of the trace `owner`. Returns whether there were any."""
        taken, self.blobs = self.blobs, []
        for blob, raw in taken:
            for number, start in enumerate(range(0, len(raw), CHUNK_BYTES)):
                await blobs.put(owner, blob, number, raw[start : start + CHUNK_BYTES])
        return bool(taken)

    def manifest(self, choice: int, tokens: int) -> list[Manifest]:
        """The manifest of the saves of the first `tokens` tokens, against which a consumer checks its fold."""
        lists: dict[str, list[bytes]] = {}
        for index in sorted(self._digests):
            if index < tokens:
                for name, found in self._digests[index]:
                    lists.setdefault(name, []).append(found)
        return [
            Manifest(invoke=0, choice=choice, name=name, kind="list", length=len(found), digest=list_digest(found))
            for name, found in lists.items()
        ]


class ReadDecoder:
    """Assigns the bytes of each batch to requests, by the last layout."""

    def __init__(self, threshold: int = 0) -> None:
        self._threshold = threshold
        self._layout = 0
        self._entries: list[tuple[LayoutEntry, list[Item]]] = []

    def layout(self, layout: Layout) -> None:
        """Take the layout of the batches that follow."""
        self._layout = layout.id
        self._entries = [
            (entry, [Item(slot, self._threshold) for slot in entry.slots if slot.parts]) for entry in layout.entries
        ]

    def batch(self, batch: Batch) -> list[tuple[LayoutEntry, int, list[Item]]]:
        """Each choice of the batch's layout, with its token index in this step and the items that it gains.

        Empty for a batch of another layout.
        """
        if batch.layout != self._layout:
            return []
        return [(entry, entry.index + batch.step, items) for entry, items in self._entries]


def extend_encoded_list(raw: bytes | memoryview, more: Sequence[bytes]) -> msgspec.Raw:
    """An encoded list with more encoded items at its end."""
    first = raw[0]
    if first & 0xF0 == 0x90:
        count, start = first & 0x0F, 1
    elif first == 0xDC:
        count, start = int.from_bytes(raw[1:3], "big"), 3
    else:
        count, start = int.from_bytes(raw[1:5], "big"), 5
    count += len(more)
    head = bytes([0x90 | count]) if count < 16 else b"\xdd" + count.to_bytes(4, "big")
    return msgspec.Raw(b"".join((head, raw[start:], *more)))
