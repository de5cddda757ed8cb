"""Decodes the reads of declared interventions: from the bytes of a step to the deltas of each trace.

The workers send one buffer a step for all requests, and once a `Layout` that assigns the bytes to requests. This module
makes one encoded delta of a choice's bytes, a record of columns. All of a delta but its values is the same from step to
step, and is prepared once, so the work for a step does not grow with the number of locations but for copying bytes. The
module also takes a digest of each record for the final's manifest, and checks stop conditions.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from tracewire_bus.store.blobs import CHUNK_BYTES, Blobs, new_blob
from tracewire_bus.wire.arrays import array_header
from tracewire_bus.wire.codec import list_head
from tracewire_bus.wire.columns import NUMBER, Column, ColumnPart, encode_layout, record_digest
from tracewire_bus.wire.digests import array_digest, dict_digest, digest, list_digest
from tracewire_bus.wire.messages import Append, ColumnsManifest, Manifest, Set, StopWhen
from tracewire_bus.wire.packing import wire
from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.protocol.messages import Batch, Layout, LayoutEntry, Read

__all__ = ["BULK_STEP_BYTES", "NO_READS", "ChoiceReads", "Item", "ReadDecoder", "StepReads", "Strings"]

_encoder = msgspec.msgpack.Encoder()
#: The encoded deltas of a step without reads.
NO_READS = list_head(0)
#: Finds the strings of tokens by their ids.
Strings: TypeAlias = Callable[[list[int]], list[str]]
#: The key of a logit lens's strings, encoded.
_STRINGS = _encoder.encode("token_strings")
_HOLE = b"\xc4\x10" + bytes(range(200, 216))
#: For how many different sets of items what these need is kept.
_REMEMBERED: Final = 512
_number = struct.Struct("<f")
#: The most bytes of a step's reads that travel in one record, large arrays among them, where a bulk store takes it.
BULK_STEP_BYTES: Final = 32 << 20
_wire_number = struct.Struct(">Bf")


def _encode_frame(delta: Append | Set) -> tuple[bytes, bytes]:
    """An encoded delta before and after its one item."""
    before, _, after = _encoder.encode(delta).partition(_HOLE)
    return before, after


class ItemPart(NamedTuple):
    """One array of an item: its key in the item (`""`: it is the whole item), and its size in bytes."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    size: int


_Described: TypeAlias = tuple[tuple[str, tuple[ItemPart, ...]], ...]
"""The name and the parts of each of several items."""


class Item:
    """Makes the item that one saved name gains in a step, of a batch's bytes.

    Args:
        name: the saved name.
        parts: the item's arrays.
        first: the place of the first of them among those of all items of a choice.
        threshold: arrays of more bytes become blobs; 0: no array does.
    """

    def __init__(self, name: str, parts: Sequence[ItemPart], first: int, threshold: int = 0) -> None:
        self.name, self.parts, self.threshold = name, parts, threshold
        self.places = range(first, first + len(parts))
        #: Whether any of its arrays becomes a blob.
        self.large = bool(threshold) and any(part.size > threshold for part in parts)
        self.nbytes = sum(part.size for part in parts)

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
    def heads(self) -> list[tuple[bytes, bytes]]:
        """Each part's array's header on the wire and in its digest."""
        return [_heads(part) for part in self.parts]

    @cached_property
    def shell(self) -> list[bytes]:
        """The encoded prefix of each part: empty, or a dict's header and keys."""
        keys = [_encoder.encode(part.key) if part.key else b"" for part in self.parts]
        if self.parts[0].key:
            keys[0] = bytes([0x80 | len(keys)]) + keys[0]
        return keys

    def take(
        self, raws: Sequence[memoryview], blobs: list[tuple[str, bytes]], strings: Strings | None = None
    ) -> tuple[bytes, bytes]:
        """The encoded item of the bytes of its parts, and its digest.

        Adds large arrays to `blobs`, and refers to them in the item. `strings` finds the strings of token ids, which
        the item of a logit lens then has too.
        """
        pieces: list[bytes | memoryview] = []
        digests: list[bytes] = []
        texts: Any = None
        for part, (head, digest_head), before, raw in zip(self.parts, self.heads, self.shell, raws, strict=True):
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
        if self.parts[0].key:
            items = [(part.key, own) for part, own in zip(self.parts, digests, strict=True)]
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


def _heads(part: ItemPart) -> tuple[bytes, bytes]:
    """The header of an array on the wire and in its digest; empty for a single number."""
    if not part.shape and part.dtype == "float32":
        return b"", b""
    return array_header(part.dtype, part.shape, part.size)


class _Place(NamedTuple):
    """Where the arrays of choices lie in a batch's bytes.

    Attributes:
        of: the set, by its place among those of each choice.
        offset: where the first row begins.
        stride: from row to row.
        size: of a choice's rows.
    """

    of: int
    offset: int
    stride: int
    size: int


class _Kind:
    """The items of choices that have the same reads in a layout, and where these lie."""

    def __init__(self, items: Sequence[Item], places: Sequence[_Place]) -> None:
        self.items = items
        self.places = places
        self._joined: dict[tuple[int, ...], list[_Place]] = {}

    def joined(self, chosen: tuple[int, ...]) -> list[_Place]:
        """The places of these parts, of which neighbours are one."""
        found = self._joined.get(chosen)
        if found is None:
            found = self._joined[chosen] = []
            for place in map(self.places.__getitem__, chosen):
                last = found[-1] if found else None
                if last is not None and place == (last.of, last.offset + last.size, last.stride, place.size):
                    found[-1] = last._replace(size=last.size + place.size)
                else:
                    found.append(place)
        return found


class StepReads:
    """The items that one choice gains in each step of a layout."""

    def __init__(self, entry: LayoutEntry, kind: _Kind) -> None:
        self.request = entry.request
        self.choice = entry.choice
        #: As in a `LayoutEntry`.
        self.index = entry.index
        self.items = kind.items
        self._kind = kind
        self._rows = [row for _, row, _ in entry.rows]

    def pieces(self, chosen: tuple[int, ...]) -> list[slice]:
        """Where these parts of its items lie in a batch's bytes, in order: neighbours are one piece."""
        found = []
        for of, offset, stride, size in self._kind.joined(chosen):
            start = offset + self._rows[of] * stride
            found.append(slice(start, start + size))
        return found

    def raw(self, place: int, data: memoryview) -> memoryview:
        """The bytes of one part of a batch's."""
        of, offset, stride, size = self._kind.places[place]
        start = offset + self._rows[of] * stride
        return data[start : start + size]


class _Plan:
    """Which items of a step travel together as a record of columns, and which travel as deltas of their own."""

    def __init__(self, columns: Sequence[Item], single: Sequence[Item]) -> None:
        self.single = single
        self.names = tuple([item.name for item in columns])
        self.layout = encode_layout([_column(item) for item in columns]) if columns else b""
        #: The parts of the columns, by their places among those of all items.
        self.chosen = tuple([place for item in columns for place in item.places])
        #: The step's encoded deltas up to the values of the columns: the first delta is their record.
        self.head = list_head(len(single) + bool(columns))
        if columns:
            size = sum(item.nbytes for item in columns)
            self.head += b"\x93\xa1c" + _encoder.encode(self.layout) + b"\xc6" + size.to_bytes(4, "big")
        #: The places of the parts of all items that stop conditions may look at, by name.
        self.numbers = [(item.name, item.places[0]) for item in (*columns, *single) if _is_numbers(item.parts[0])]


def _column(item: Item) -> Column:
    parts = [
        ColumnPart(part.key, part.dtype if part.shape or part.dtype != "float32" else NUMBER, part.shape)
        for part in item.parts
    ]
    return Column(item.name, tuple(parts))


def _is_numbers(part: ItemPart) -> bool:
    """Whether a stop condition may look at an item's first part: float32, and a number or a row of them."""
    return part.dtype == "float32" and len(part.shape) <= 1 and not part.key


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
        self._items: Sequence[Item] = ()
        self._plan = _Plan((), ())
        self._pieces: list[slice] = []
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
            if reads.items is not self._items:
                self._items, self._plan = reads.items, self._planned(reads.items)
            self._reads, self._pieces = reads, reads.pieces(self._plan.chosen)
        plan = self._plan
        if self.thinned:
            self.left_out += 1
            self.steps[index] = NO_READS
        else:
            values = [data[piece] for piece in self._pieces]
            if plan.layout:
                self._named_by[index] = self._names.setdefault(plan.names, plan.names)
                self._records[index] = record_digest(plan.layout, *values)
            single = self._take_single(index, reads, data) if plan.single else ()
            # The one copy of the values: `data` may change afterwards.
            self.steps[index] = b"".join((plan.head, *values, *single))
        if self._stops:
            self._check_stops(index, {name: reads.raw(place, data).cast("f") for name, place in plan.numbers})

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
        return self.strings is not None and any(part.key == "token_ids" for part in item.parts)

    def _take_single(self, index: int, reads: StepReads, data: memoryview) -> list[bytes]:
        """An encoded delta for each of the items that travel by themselves."""
        deltas: list[bytes] = []
        digests: list[tuple[str, bytes]] = []
        for item in self._plan.single:
            raws = [reads.raw(place, data) for place in item.places]
            encoded, found = item.take(raws, self.blobs, self.strings)
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
        #: Items by what they consist of. A batch that changes has a new layout, and mostly the same items.
        self._items: OrderedDict[_Described, tuple[Item, ...]] = OrderedDict()

    def layout(self, layout: Layout) -> None:
        """Take the layout of the batches that follow."""
        self._layout = layout.id
        kinds: dict[tuple[tuple[int, int], ...], _Kind] = {}
        self._entries = []
        for entry in layout.entries:
            key = tuple([(place, count) for place, _, count in entry.rows])
            kind = kinds.get(key)
            if kind is None:
                kind = kinds[key] = self._kind([(layout.sets[place], count) for place, count in key])
            self._entries.append(StepReads(entry, kind))

    def _kind(self, sets: Sequence[tuple[list[Read], int]]) -> _Kind:
        """The items of choices with these sets of reads, with so many rows of each."""
        described = []
        places = []
        for place, (reads, count) in enumerate(sets):
            for read in reads:
                parts = [
                    ItemPart(part.key, part.dtype, part.shape if read.flat else (count, *part.shape), part.size * count)
                    for part in read.parts
                ]
                if parts:
                    described.append((read.name, tuple(parts)))
                places += [_Place(place, part.offset, part.stride, part.size * count) for part in read.parts]
        return _Kind(self._items_of(tuple(described)), places)

    def _items_of(self, described: _Described) -> tuple[Item, ...]:
        found = self._items.get(described)
        if found is not None:
            self._items.move_to_end(described)
            return found
        items, first = [], 0
        for name, parts in described:
            items.append(Item(name, parts, first, self._threshold))
            first += len(parts)
        found = self._items[described] = tuple(items)
        if len(self._items) > _REMEMBERED:
            self._items.popitem(last=False)
        return found

    def batch(self, batch: Batch) -> list[tuple[StepReads, int]]:
        """The reads of each choice of the batch's layout, with its token index in this step.

        Empty for a batch of another layout.
        """
        if batch.layout != self._layout:
            return []
        return [(reads, reads.index + batch.step) for reads in self._entries]
