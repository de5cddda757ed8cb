"""What declared interventions read, decoded on the adapter's side."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from tests.support.declared_plans import (
    DELTAS,
)
from tracewire_bus.domain.fold import Fold
from tracewire_bus.domain.intervention_checks import decode_interventions, normalize
from tracewire_bus.wire.codec import decode_event, encode_output, extend_encoded_list
from tracewire_bus.wire.columns import Column, ColumnPart, encode_layout, record_digest
from tracewire_bus.wire.messages import Append, Columns, DecodedOutput, Final, RawOutput, StopWhen
from tracewire_bus.wire.pieces import LARGE_BYTES, Pieces
from tracewire_engine.adapter import read_decoder
from tracewire_engine.adapter.pending import PendingRecords
from tracewire_engine.adapter.read_decoder import ChoiceReads, ReadDecoder, StepReads
from tracewire_engine.protocol.messages import Batch, Layout, LayoutEntry, Part, Read, StepRecord


def folded(reads: ChoiceReads, tokens: int) -> dict[str, Any]:
    """What a consumer holds of the reads of a choice's first tokens, compared with their manifest."""
    fold = Fold()
    for index in range(tokens):
        deltas = DELTAS(reads.steps[index])
        fold.apply(DecodedOutput(attempt=1, seq=index, index=index, token_ids=[0], deltas=[deltas]))
    columns = reads.columns_manifest(0, 0, tokens)
    manifest = reads.manifest(0, tokens)
    sealed = [] if columns is None else [columns]
    fold.apply(Final(attempt=1, seq=tokens, status="finished", manifest=manifest, columns=sealed))
    fold.verify()
    return fold.choices[0, 0].saves


def part(key: str, dtype: str, shape: tuple[int, ...], offset: int, size: int) -> Part:
    """An array of which there is one row."""
    return Part(key, dtype, shape, size, offset, size)


def step_of(*reads: Read, threshold: int = 0) -> StepReads:
    """What one choice reads in each step."""
    return steps_of(ReadDecoder(threshold), *reads)


def steps_of(decoder: ReadDecoder, *reads: Read) -> StepReads:
    """The same, by a decoder that may know these reads."""
    decoder.layout(Layout(1, [list(reads)], [LayoutEntry("r", 0, 0, [(0, 0, 1)])]))
    ((step, index),) = decoder.batch(Batch(1, 3))
    assert index == 3
    return step


def test_a_stop_condition_counts_steps_in_a_row() -> None:
    (one,) = decode_interventions(normalize([StopWhen("p", above=1.0, steps=2)]))
    reads = ChoiceReads([one])

    step = step_of(Read("p", [part("", "float32", (), 4, 4)]))
    for index, value in enumerate([2.0, 0.0, 2.0, 2.0, 2.0]):
        reads.take(index, step, memoryview(np.array([9.0, value], np.float32).tobytes()))
    assert reads.stopped is one
    assert reads.stopped_at == 3
    assert sorted(reads.steps) == [0, 1, 2, 3]


def test_an_append_follows_a_set_and_lists_join() -> None:
    encoded = msgspec.msgpack.encode([Append(path=("a",), items=[1])])
    more = msgspec.msgpack.encode([Append(path=(f"n{number}",), items=[number]) for number in range(20)])
    found = DELTAS(bytes(extend_encoded_list(encoded, more)))
    assert [delta.path[0] for delta in found] == ["a", *(f"n{number}" for number in range(20))]


@pytest.mark.parametrize("width", [4, LARGE_BYTES // 8, LARGE_BYTES])
@pytest.mark.parametrize("saves", [0, 1])
def test_small_and_large_records_have_the_same_encoding(width: int, saves: int) -> None:
    """Where the values lie, and whether an output is one buffer or several, does not show on the wire."""
    values = np.arange(4 * width, dtype=np.float32).reshape(4, width)
    places = [0, 1, 3]
    slots = [Read(f"h{n}", [part("", "float32", (width,), 4 * width * n, 4 * width)]) for n in places]
    data = bytearray(values.tobytes())
    pending = PendingRecords(1, block=bool(saves), reads=True)
    pending.read(0, step_of(*slots), memoryview(data), 1.5)
    # The bytes of the batch are the next step's now.
    data[:] = bytes(len(data))
    saved = [Append(path=("a",), items=[7])] * saves
    if saves:
        pending.step(StepRecord("r", 0, 0, msgspec.Raw(msgspec.msgpack.encode(saved))), 1.5)
    assert pending.nbytes > 12 * width
    steps = anyio.run(pending.steps, 0, 0, 1)
    assert pending.nbytes == 0
    output = RawOutput(1, 0, token_ids=[7], text="x", deltas=steps, token_strings=["x"])
    encoded = encode_output(output)
    assert isinstance(encoded, Pieces) == (12 * width >= LARGE_BYTES)
    columns = [Column(f"h{n}", (ColumnPart("", "float32", (width,)),)) for n in places]
    record = Columns(encode_layout(columns), memoryview(values[places].tobytes()))
    plain = DecodedOutput(1, 0, token_ids=[7], text="x", deltas=[[*saved, record]], token_strings=["x"])
    assert decode_event(bytes(encoded)) == plain
    assert bytes(pending.choices[0].reads._records[0]) == record_digest(record.layout, record.values)


def test_a_logit_lens_has_strings_of_the_shape_of_its_ids() -> None:
    ids = np.arange(12, dtype=np.int32).reshape(2, 3, 2)
    logits = ids.astype(np.float32)
    parts = [part("token_ids", "int32", (2, 3, 2), 0, 48), part("logits", "float32", (2, 3, 2), 48, 48)]
    data = memoryview(ids.tobytes() + logits.tobytes())
    for strings in (None, lambda found: [f"<{one}>" for one in found]):
        reads = ChoiceReads()
        reads.strings = strings
        reads.take(0, step_of(Read("lens", parts)), data)
        (item,) = folded(reads, 1)["lens"]
        np.testing.assert_array_equal(item["token_ids"], ids)
        np.testing.assert_array_equal(item["logits"], logits)
        expected = [[[f"<{one}>" for one in row] for row in rows] for rows in ids.tolist()]
        assert item.get("token_strings") == (None if strings is None else expected)


def test_all_reads_of_a_step_are_one_record() -> None:
    """However many names there are, and wherever their values lie in the step's bytes."""
    values = np.arange(64, dtype=np.float32).reshape(16, 4)
    slots = [Read(f"h{layer}", [part("", "float32", (4,), 16 * layer, 16)]) for layer in range(16)]
    step = step_of(*slots)
    apart = step_of(*reversed(slots))
    reads = ChoiceReads()
    for index in range(3):
        reads.take(index, step if index < 2 else apart, memoryview((values + index).tobytes()))
    assert [len(DELTAS(deltas)) for deltas in reads.steps.values()] == [1, 1, 1]
    saves = folded(reads, 3)
    assert sorted(saves) == sorted(slot.name for slot in slots)
    for layer in range(16):
        np.testing.assert_array_equal(np.stack(saves[f"h{layer}"]), [values[layer] + index for index in range(3)])
    (sealed,) = [reads.columns_manifest(0, 0, 2)]
    assert sealed is not None
    assert sealed.records == 2


def test_a_large_item_travels_as_a_reference_and_its_name_by_itself_from_then_on() -> None:
    """Beside it the names whose items are small go on as a record."""
    parts = {size: part("", "float32", (size,), 0, 4 * size) for size in (2, 100)}
    first = step_of(Read("a", [parts[100]]), Read("b", [parts[2]]), threshold=64)
    later = step_of(Read("a", [parts[2]]), Read("b", [parts[2]]), threshold=64)
    data = memoryview(np.arange(100, dtype=np.float32).tobytes())
    reads = ChoiceReads()
    for index, step in enumerate((first, later)):
        reads.take(index, step, data)
    assert len(reads.blobs) == 1
    saves = folded(reads, 2)
    assert (saves["a"][0].shape, saves["a"][0].blob) == ((100,), reads.blobs[0][0])
    np.testing.assert_array_equal(saves["a"][1], [0, 1])
    np.testing.assert_array_equal(saves["b"], [[0, 1], [0, 1]])


@pytest.mark.parametrize("most", [400, 399])
def test_a_large_item_for_a_bulk_store_travels_in_the_record(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Up to some bytes a step, since the record goes to Redis whole if the store is full meanwhile."""
    monkeypatch.setattr(read_decoder, "BULK_STEP_BYTES", most)
    values = np.arange(100, dtype=np.float32)
    reads = ChoiceReads()
    reads.in_bulk = True
    step = step_of(Read("a", [part("", "float32", (100,), 0, 400)]), threshold=64)
    reads.take(0, step, memoryview(values.tobytes()))
    assert len(reads.blobs) == (most < 400)
    (found,) = folded(reads, 1)["a"]
    assert found.shape == (100,)
    if not reads.blobs:
        np.testing.assert_array_equal(found, values)


def test_rows_of_several_choices_are_told_apart() -> None:
    """Two choices have two reads side by side, and one of them has several rows of another read."""
    pair = [Read("a", [Part("", "float32", (2,), 8, 0, 12)]), Read("b", [Part("", "float32", (), 4, 8, 12)])]
    several = [Read("c", [Part("", "int32", (1,), 4, 24, 4)], flat=False)]
    entries = [LayoutEntry("r", 0, 5, [(0, 1, 1), (1, 1, 3)]), LayoutEntry("s", 0, 7, [(0, 0, 1)])]
    decoder = ReadDecoder()
    decoder.layout(Layout(4, [pair, several], entries))
    data = memoryview(np.array([0, 1, 2, 3, 4, 5], np.float32).tobytes() + np.arange(5, dtype=np.int32).tobytes())
    assert decoder.batch(Batch(3, 0)) == []
    found = {}
    for step, index in decoder.batch(Batch(4, 1)):
        reads = ChoiceReads()
        reads.take(0, step, data)
        saves = folded(reads, 1)
        found[step.request] = index, {name: np.asarray(values[0]).tolist() for name, values in saves.items()}
    assert found == {
        "r": (6, {"a": [3, 4], "b": 5, "c": [[1], [2], [3]]}),
        "s": (8, {"a": [0, 1], "b": 2}),
    }


def test_a_layout_with_the_reads_of_an_earlier_one_has_its_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever its rows lie."""
    monkeypatch.setattr(read_decoder, "_REMEMBERED", 2)
    decoder = ReadDecoder()
    first = steps_of(decoder, Read("a", [part("", "float32", (2,), 0, 8)]))
    other = steps_of(decoder, Read("a", [part("", "float32", (2,), 4, 8)]), Read("b", [part("", "int32", (), 0, 4)]))
    again = steps_of(decoder, Read("a", [part("", "float32", (2,), 4, 8)]))
    assert again.items is first.items
    assert other.items is not first.items
    data = memoryview(np.arange(3, dtype=np.float32).tobytes())
    reads = ChoiceReads()
    for index, step in enumerate((first, again)):
        reads.take(index, step, data)
    np.testing.assert_array_equal(folded(reads, 2)["a"], [[0, 1], [1, 2]])
    steps_of(decoder, Read("c", []), Read("d", [part("", "int32", (), 0, 4)]))
    assert steps_of(decoder, Read("a", [part("", "float32", (2,), 0, 8)])).items is again.items
    assert steps_of(decoder, Read("c", [])).items == ()
    assert len(decoder._items) == 2
