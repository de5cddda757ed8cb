"""Decodes the reads of declared interventions: from the bytes of a step to the deltas of each trace.

The workers send one buffer a step for all requests, and once a `Layout` that assigns the bytes to requests. This module
makes one encoded delta of a choice's bytes, a record of columns. All of a delta but its values is the same from step to
step, and is prepared once, so the work for a step does not grow with the number of locations but for copying bytes. The
module also takes a digest of each record for the final's manifest, and checks stop conditions.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, TypeAlias

import msgspec

from tracewire_bus.store.blobs import CHUNK_BYTES, Blobs, new_blob
from tracewire_bus.wire.arrays import array_header
from tracewire_bus.wire.codec import list_head
from tracewire_bus.wire.columns import NUMBER, Column, ColumnPart, encode_layout, record_digest
from tracewire_bus.wire.digests import array_digest, dict_digest, digest, list_digest
from tracewire_bus.wire.messages import Append, ColumnsManifest, Manifest, Set, StopWhen
from tracewire_bus.wire.packing import wire
from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.protocol.messages import Batch, Layout, LayoutEntry, Part, Slot

__all__ = ["BULK_STEP_BYTES", "NO_READS", "ChoiceReads", "Item", "ReadDecoder", "StepReads", "Strings"]

_encoder = msgspec.msgpack.Encoder()
#: The encoded deltas of a step without reads.
NO_READS = list_head(0)
#: Finds the strings of tokens by their ids.
Strings: TypeAlias = Callable[[list[int]], list[str]]
#: The key of a logit lens's strings, encoded.
_STRINGS = _encoder.encode("token_strings")
_HOLE = b"\xc4\x10" + bytes(range(200, 216))
_number = struct.Struct("<f")
#: The most bytes of a step's reads that travel in one record, large arrays among them, where a bulk store takes it.
BULK_STEP_BYTES: Final = 32 << 20
_wire_number = struct.Struct(">Bf")


def _encode_frame(delta: Append | Set) -> tuple[bytes, bytes]:
    """An encoded delta before and after its one item."""
    before, _, after = _encoder.encode(delta).partition(_HOLE)
    return before, after


class Item:
    """Makes the item that one saved name gains in a step, of a batch's bytes."""

    def __init__(self, slot: Slot, threshold: int = 0) -> None:
        self.slot = slot
        #: Arrays of more bytes become blobs; 0: no array does.
        self.threshold = threshold
        self.name = slot.name
        #: Whether any of its arrays becomes a blob.
        self.large = bool(threshold) and any(part.size > threshold for part in slot.parts)
        self.nbytes = sum(part.size for part in slot.parts)

    # Most items travel in records of columns, which need none of what follows.

    @cached_property
    def append(self) -> tuple[bytes, bytes]:
        """The encoded delta of a later step, before and after the item."""
        return _encode_frame(Append(path=(self.name,), items=[msgspec.Raw(_HOLE)]))

    @cached_property
    def start(self) -> tuple[bytes, bytes]:
        """The encoded delta of the first step, before and after the item."""
        return _encode_frame(Set(path=(self.name,), value=[msgspec.Raw(_HOLE)]))

    @cached_property
    def parts(self) -> list[tuple[Part, bytes, bytes]]:
        """The parts, each with its array's header on the wire and in its digest."""
        return [(part, *_heads(part)) for part in self.slot.parts]

    @cached_property
    def shell(self) -> list[bytes]:
        """The encoded prefix of each part: empty, or a dict's header and keys."""
        parts = self.slot.parts
        keys = [_encoder.encode(part.key) if part.key else b"" for part in parts]
        if parts[0].key:
            keys[0] = bytes([0x80 | len(keys)]) + keys[0]
        return keys

    def take(
        self, data: memoryview, blobs: list[tuple[str, bytes]], strings: Strings | None = None
    ) -> tuple[bytes, bytes]:
        """The encoded item, and its digest.

        Adds large arrays to `blobs`, and refers to them in the item. `strings` finds the strings of token ids, which
        the item of a logit lens then has too.
        """
        pieces: list[bytes | memoryview] = []
        digests: list[bytes] = []
        texts: Any = None
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
            elif self.threshold and part.size > self.threshold:
                taken = ArrayRef(part.dtype, part.shape, array_digest(digest_head, raw), new_blob(), self.name)
                pieces.append(_encoder.encode(wire(taken)))
                digests.append(taken.digest)
                blobs.append((taken.blob, bytes(raw)))
            else:
                pieces += (head, raw)
                digests.append(array_digest(digest_head, raw))
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
        return b"".join(pieces), found


def _reshape(flat: list[str], shape: tuple[int, ...]) -> Any:
    """Nested lists of the items of `flat`, of this shape."""
    for size in shape[:0:-1]:
        flat = [flat[start : start + size] for start in range(0, len(flat), size)]  # type: ignore[misc]
    return flat


def _heads(part: Part) -> tuple[bytes, bytes]:
    """The header of an array on the wire and in its digest; empty for a single number."""
    if not part.shape and part.dtype == "float32":
        return b"", b""
    return array_header(part.dtype, part.shape, part.size)


class StepReads:
    """The items that one choice gains in each step of a layout."""

    def __init__(self, entry: LayoutEntry, threshold: int) -> None:
        self.request = entry.request
        self.choice = entry.choice
        #: The index of the token of the layout's first step.
        self.index = entry.index
        self.items = [Item(slot, threshold) for slot in entry.slots if slot.parts]


class _Plan:
    """Which items of a step travel together as a record of columns, and which travel as deltas of their own."""

    def __init__(self, columns: Sequence[Item], single: Sequence[Item]) -> None:
        self.single = single
        self.names = tuple([item.name for item in columns])
        self.layout = encode_layout([_column(item.slot) for item in columns]) if columns else b""
        #: Where the values of the columns lie in a batch's bytes, in order: neighbours are one piece.
        self.pieces: list[tuple[int, int]] = []
        for part in (part for item in columns for part in item.slot.parts):
            if self.pieces and self.pieces[-1][1] == part.offset:
                self.pieces[-1] = (self.pieces[-1][0], part.offset + part.size)
            else:
                self.pieces.append((part.offset, part.offset + part.size))
        #: The step's encoded deltas up to the values of the columns: the first delta is their record.
        self.head = list_head(len(single) + bool(columns))
        if columns:
            size = sum(end - start for start, end in self.pieces)
            self.head += b"\x93\xa1c" + _encoder.encode(self.layout) + b"\xc6" + size.to_bytes(4, "big")
        #: The parts of all items that stop conditions may look at, by name.
        self.numbers = [
            (item.name, found) for item in (*columns, *single) if (found := _number_part(item.slot)) is not None
        ]

    def values(self, data: memoryview) -> list[memoryview]:
        """The values of the columns, in pieces of a batch's bytes."""
        return [data[start:end] for start, end in self.pieces]


def _column(slot: Slot) -> Column:
    parts = [
        ColumnPart(part.key, part.dtype if part.shape or part.dtype != "float32" else NUMBER, part.shape)
        for part in slot.parts
    ]
    return Column(slot.name, tuple(parts))


def _number_part(slot: Slot) -> Part | None:
    """The part of an item at which a stop condition may look: float32, and a number or a row of them."""
    part = slot.parts[0]
    return part if part.dtype == "float32" and len(part.shape) <= 1 and not part.key else None


def _floats(data: memoryview, part: Part) -> Sequence[float]:
    return memoryview(data[part.offset : part.offset + part.size]).cast("f")


class ChoiceReads:
    """The reads of declared interventions for one choice, by the index of the step's token.

    With `columns`, the items of a step travel as one record, but for those of names whose first item is large or has
    strings: these travel by themselves, in each step. A record that goes to a bulk store has large items, too.
    """

    def __init__(self, stops: Sequence[StopWhen] = (), *, columns: bool = True) -> None:
        #: Finds the strings of token ids, which the items of logit lenses then have too.
        self.strings: Strings | None = None
        #: Whether a bulk store takes the trace's large saves, so that a large array need not become a blob.
        self.in_bulk = False
        #: The deltas of each step, as an encoded list.
        self.steps: dict[int, bytes] = {}
        #: Whether the reads of the following steps are left out; and the number of steps whose reads were.
        self.thinned = False
        self.left_out = 0
        #: Large arrays, by the name of their blob. The bus must have them before the deltas that refer to them.
        self.blobs: list[tuple[str, bytes]] = []
        self._columns = columns
        #: By name, whether its items travel in records.
        self._in_records: dict[str, bool] = {}
        self._reads: StepReads | None = None
        self._plan = _Plan((), ())
        self._started: set[str] = set()
        #: By index, the names in the step's record, and its digest. A layout of its own for each step has the same
        #: names as those before it, as a rule.
        self._named_by: dict[int, tuple[str, ...]] = {}
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._records: dict[int, bytes] = {}
        self._digests: dict[int, list[tuple[str, bytes]]] = {}
        self._stops = list(stops)
        self._streaks = [0] * len(self._stops)
        #: The first stop condition that was met, and the token index at which it was met.
        self.stopped: StopWhen | None = None
        self.stopped_at: int | None = None

    def take(self, index: int, reads: StepReads, data: memoryview) -> None:
        """Take the reads of the step that sampled token `index`; none behind a stop."""
        if self.stopped_at is not None and index > self.stopped_at:
            return
        if reads is not self._reads:
            self._reads, self._plan = reads, self._planned(reads.items)
        plan = self._plan
        if self.thinned:
            self.left_out += 1
            self.steps[index] = NO_READS
        else:
            values = plan.values(data)
            if plan.layout:
                self._named_by[index] = self._names.setdefault(plan.names, plan.names)
                self._records[index] = record_digest(plan.layout, *values)
            single = self._take_single(index, plan.single, data) if plan.single else ()
            # The one copy of the values: `data` may change afterwards.
            self.steps[index] = b"".join((plan.head, *values, *single))
        if self._stops:
            self._check_stops(index, {name: _floats(data, part) for name, part in plan.numbers})

    def _planned(self, items: Sequence[Item]) -> _Plan:
        whole = self.in_bulk and sum(item.nbytes for item in items) <= BULK_STEP_BYTES
        for item in items:
            small = whole or not item.large
            self._in_records.setdefault(item.name, self._columns and small and not self._with_strings(item))
        return _Plan(
            [item for item in items if self._in_records[item.name]],
            [item for item in items if not self._in_records[item.name]],
        )

    def _with_strings(self, item: Item) -> bool:
        return self.strings is not None and any(part.key == "token_ids" for part in item.slot.parts)

    def _take_single(self, index: int, items: Sequence[Item], data: memoryview) -> list[bytes]:
        """An encoded delta for each of these items."""
        deltas: list[bytes] = []
        digests: list[tuple[str, bytes]] = []
        for item in items:
            encoded, found = item.take(data, self.blobs, self.strings)
            if item.name in self._started:
                before, after = item.append
            else:
                self._started.add(item.name)
                before, after = item.start
            deltas.append(before + encoded + after)
            digests.append((item.name, found))
        self._digests[index] = digests
        return deltas

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
        lengths: dict[str, int] = {}
        for names, steps in Counter(names for index, names in self._named_by.items() if index < tokens).items():
            for name in names:
                lengths[name] = lengths.get(name, 0) + steps
        entries = [(name, len(found), list_digest(found)) for name, found in lists.items()]
        return [
            Manifest(invoke=0, choice=choice, name=name, kind="list", length=length, digest=digest)
            for name, length, digest in (*entries, *((name, length, b"") for name, length in lengths.items()))
        ]

    def columns_manifest(self, invoke: int, choice: int, tokens: int) -> ColumnsManifest | None:
        """Covers the records of the first `tokens` tokens; `None` if there are none."""
        digests = [self._records[index] for index in sorted(self._records) if index < tokens]
        if not digests:
            return None
        return ColumnsManifest(invoke=invoke, choice=choice, records=len(digests), digest=list_digest(digests))


class ReadDecoder:
    """Assigns the bytes of each batch to requests, by the last layout."""

    def __init__(self, threshold: int = 0) -> None:
        self._threshold = threshold
        self._layout = 0
        self._entries: list[StepReads] = []

    def layout(self, layout: Layout) -> None:
        """Take the layout of the batches that follow."""
        self._layout = layout.id
        self._entries = [StepReads(entry, self._threshold) for entry in layout.entries]

    def batch(self, batch: Batch) -> list[tuple[StepReads, int]]:
        """The reads of each choice of the batch's layout, with its token index in this step.

        Empty for a batch of another layout.
        """
        if batch.layout != self._layout:
            return []
        return [(reads, reads.index + batch.step) for reads in self._entries]
