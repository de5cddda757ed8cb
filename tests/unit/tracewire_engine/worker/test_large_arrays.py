"""Large arrays in a worker: frozen at their step, sent in chunks, folded like any other."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.support.equality import equal
from tests.support.large_arrays import large
from tracewire_bus.domain.fold import Fold
from tracewire_bus.wire.arrays import array_from_raw
from tracewire_bus.wire.codec import decode_event, encode
from tracewire_bus.wire.digests import digest
from tracewire_bus.wire.messages import RawOutput
from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.adapter.trace_stream import RawFinal
from tracewire_engine.worker.large_arrays import LargeArray, LargeArrayBudget
from tracewire_engine.worker.large_arrays import encode as encode_large
from tracewire_engine.worker.save_tracker import SaveTracker


def raw(deltas: list[Any]) -> msgspec.Raw:
    return msgspec.Raw(encode_large(deltas))


class Replay:
    """A tracker with a threshold; what it freezes is stored at once, and its deltas go over the wire to a fold."""

    def __init__(self, threshold: int = 1000) -> None:
        self.budget = LargeArrayBudget(threshold)
        self.tracker = SaveTracker(self.budget)
        self.fold = Fold()
        self.seq = 0
        self.saves: dict[str, Any] = {}
        self.blobs: dict[str, bytes] = {}

    def ship(self, arrays: list[LargeArray]) -> None:
        for array in arrays:
            self.blobs[array.blob] = b"".join(bytes(chunk) for chunk in array.chunks())
            array.release()

    def apply(self, event: Any) -> None:
        self.fold.apply(decode_event(encode(event)))
        self.seq += 1

    def step(self) -> int:
        deltas = self.tracker.step(self.saves)
        taken = self.tracker.taken
        self.ship(taken)
        self.apply(RawOutput(attempt=1, seq=self.seq, index=self.seq, token_ids=[7], deltas=[raw(deltas)]))
        return len(taken)

    def finish(self) -> int:
        ending = self.tracker.ending(self.saves, 0, 0)
        self.ship(ending.taken)
        for array in ending.again:
            list(array.chunks())
        deltas, manifest, changed = ending.compare()
        self.ship(changed)
        for array in ending.again:
            array.release()
        self.apply(
            RawFinal(attempt=1, seq=self.seq, status="finished", deltas=[(0, 0, raw(deltas))], manifest=manifest)
        )
        self.fold.verify()
        return len(ending.taken) + len(changed)

    def loaded(self, value: Any = None) -> Any:
        """What the fold holds, with the blobs in place of the references."""
        value = self.fold.choices[0, 0].saves if value is None else value
        if isinstance(value, ArrayRef):
            return array_from_raw(value.dtype, value.shape, self.blobs[value.blob])
        if isinstance(value, list | tuple):
            return type(value)(self.loaded(item) for item in value)
        if isinstance(value, dict):
            return {key: self.loaded(item) for key, item in value.items()}
        return value


def test_only_what_is_above_the_threshold_is_frozen() -> None:
    replay = Replay(threshold=400)
    replay.saves = {"at": torch.ones(100), "above": torch.ones(101), "array": np.ones(51), "nested": [{"k": large()}]}
    assert replay.step() == 3
    saves = replay.fold.choices[0, 0].saves
    assert isinstance(saves["at"], np.ndarray)
    assert [type(value) for value in (saves["above"], saves["array"], saves["nested"][0]["k"])] == [ArrayRef] * 3
    assert (saves["above"].name, saves["nested"][0]["k"].name) == ("above", "nested")
    assert replay.finish() == 0
    assert equal(replay.loaded(), replay.saves)
    assert replay.budget.reserved == 0


@pytest.mark.parametrize(
    "value",
    [
        large(dtype=torch.bfloat16),
        large(dtype=torch.float8_e4m3fn),
        torch.nn.Parameter(large()),
        large(dtype=torch.complex64).conj(),
        large().reshape(10, 100).T,
        large()[::2],
        np.arange(1000, dtype=">i8"),
        (large(), 1, [large(1), {"a": (torch.ones(2),)}]),
    ],
    ids=["bfloat16", "float8", "parameter", "conj", "strides", "view", "big endian", "tuple"],
)
def test_any_large_array_arrives_as_it_would_inline(value: Any) -> None:
    replay = Replay(threshold=900)
    replay.saves = {"x": value}
    assert replay.step() >= 1
    assert replay.finish() == 0
    assert equal(replay.loaded(), {"x": value})
    assert replay.budget.reserved == 0


def test_what_is_frozen_is_of_its_step() -> None:
    tracker = SaveTracker(LargeArrayBudget(1000))
    base = large()
    tracker.step({"view": base[:500], "pair": (base, 1)})
    base.fill_(-1.0)
    taken = tracker.taken
    first = torch.cat([torch.frombuffer(bytearray(chunk), dtype=torch.float32) for chunk in taken[0].chunks()])
    assert torch.equal(first, large()[:500])
    assert sum(chunk.nbytes for chunk in taken[1].chunks()) == 4000
    assert taken[1].digest == digest(large())


def test_changes_in_place_are_sent_once_in_the_end() -> None:
    replay = Replay()
    total, same = large(), large(5)
    replay.saves = {"total": total, "same": same, "pair": (large(1), total), "rows": [large(2)]}
    assert replay.step() == 5
    total += 1
    replay.saves["rows"][0] *= 2
    assert replay.step() == 0
    sent = len(replay.blobs)
    assert replay.finish() == 4
    assert len(replay.blobs) == sent + 4
    assert equal(replay.loaded(), replay.saves)


def test_one_array_under_two_names_is_one_blob() -> None:
    replay = Replay()
    one = large()
    replay.saves = {"a": one, "b": [one, one]}
    assert replay.step() == 1
    assert len(replay.blobs) == 1
    replay.finish()
    assert equal(replay.loaded(), replay.saves)


def test_the_end_copies_nothing_that_nobody_shares() -> None:
    replay = Replay()
    whole = large()
    replay.saves = {"own": large(), "view": whole[:600]}
    replay.step()
    ending = replay.tracker.ending(replay.saves, 0, 0)
    assert replay.budget.reserved == 600 * 4
    for array in ending.again:
        array.release()
    assert replay.budget.reserved == 0


def test_what_an_ended_block_saved_is_neither_copied_nor_looked_at_again() -> None:
    replay = Replay()
    own, shared, kept = large(), large(), large()
    replay.budget.changes = lambda tensor: tensor is kept
    replay.saves = {"own": own, "view": shared[:600], "kept": kept, "pair": (large(1), 1)}
    deltas = replay.tracker.step(replay.saves, still=True)
    assert [array.borrowed for array in replay.tracker.taken] == [True, False, False, True]
    replay.ship(replay.tracker.taken)
    replay.apply(RawOutput(attempt=1, seq=0, token_ids=[7], deltas=[raw(deltas)]))
    kept += 1
    ending = replay.tracker.ending(replay.saves, 0, 0)
    assert [array.name for array in ending.again] == ["view", "kept", "pair"]
    for array in ending.again:
        array.release()
    assert replay.finish() == 1
    assert equal(replay.loaded(), replay.saves)


def test_more_than_a_worker_holds_is_refused_by_name() -> None:
    replay = Replay()
    replay.budget.limit = 10_000
    replay.saves = {"a": large(), "b": [torch.ones(3000)], "c": 1}
    replay.step()
    assert "wait for the bus already" in replay.tracker.errors["b"]
    replay.finish()
    assert equal(replay.loaded(), {"a": large(), "c": 1})
    assert replay.budget.reserved == 0


def test_arrays_for_which_there_is_no_room_elsewhere_are_refused_and_named() -> None:
    replay = Replay()
    replay.budget.room = 10_000
    replay.saves = {"first": large(), "second": large(1), "third": large(2)}
    assert replay.step() == 2
    assert replay.budget.room == 2000
    assert replay.tracker.errors == {"third": "earlier large arrays wait for the bus; at most 2000 bytes more may"}
    # An array that is only compared takes no room, and one that is sent again does.
    replay.budget.room = 5000
    replay.saves["second"].add_(1)
    assert replay.finish() == 1
    assert replay.budget.room == 1000
    assert equal(replay.loaded(), {"first": large(), "second": large(2)})


def test_a_changed_array_for_which_there_is_no_room_is_refused() -> None:
    replay = Replay()
    replay.saves = {"first": large(), "second": large(1)}
    assert replay.step() == 2
    replay.budget.room = 100
    replay.saves["second"].add_(1)
    assert replay.finish() == 0
    assert replay.tracker.errors == {"second": "earlier large arrays wait for the bus; at most 100 bytes more may"}
    assert equal(replay.loaded(), {"first": large()})
