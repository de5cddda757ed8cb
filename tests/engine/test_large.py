"""Large arrays between a worker and its adapter: frozen at their step, sent in chunks, folded like any other."""

# ruff: noqa: ASYNC240
from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import torch

from tests.support.equality import equal
from tracewire_bus.bus import Bus
from tracewire_bus.domain.fold import Fold
from tracewire_bus.store.blobs import CHUNK_BYTES
from tracewire_bus.wire.arrays import array_from_raw
from tracewire_bus.wire.codec import decode_event, encode
from tracewire_bus.wire.digests import digest
from tracewire_bus.wire.messages import Block, Invoke, RawOutput, Submission
from tracewire_bus.wire.packing import pack
from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.adapter.engine_api import Rejection
from tracewire_engine.adapter.large_inputs import Inputs
from tracewire_engine.adapter.trace_stream import RawFinal
from tracewire_engine.link.blob_receiver import BlobChunk, BlobReceiver
from tracewire_engine.protocol.input_files import input_path
from tracewire_engine.protocol.messages import FinishRecord, Report, StepRecord
from tracewire_engine.worker.blob_sender import BlobSender
from tracewire_engine.worker.large_arrays import LargeArray, LargeArrayBudget
from tracewire_engine.worker.large_arrays import encode as encode_large
from tracewire_engine.worker.save_tracker import SaveTracker
from tracewire_engine.worker.tensors import to_tensors


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


def large(number: float = 0.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(1000) + number).to(dtype)


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


# --- the way to the adapter -------------------------------------------------------------------------------------------


@asynccontextmanager
async def link(folder: Path) -> AsyncIterator[tuple[BlobSender, BlobReceiver]]:
    address = f"ipc://{folder}/link"
    with BlobReceiver(address) as receiver:
        yield BlobSender(address), receiver


def reported(sender: BlobSender, tracker: SaveTracker, request: str, saves: dict[str, Any], index: int = 0) -> None:
    deltas = tracker.step(saves)
    sender.step(StepRecord(request, 0, index, msgspec.Raw(b"\x90")), deltas, tracker.taken)


async def test_chunks_come_before_what_refers_to_them_and_requests_take_turns(tmp_path: Path) -> None:
    budget = LargeArrayBudget(1000)
    async with link(tmp_path) as (sender, receiver):
        big, small = SaveTracker(budget), SaveTracker(budget)
        values = {"x": torch.rand(4 * CHUNK_BYTES)}
        reported(sender, big, "big", values)
        reported(sender, small, "small", {"y": large()})
        sender.finish(FinishRecord("big", 0, msgspec.Raw(b"\x90")), big.ending(values, 0, 0), lambda manifest: None)
        order: list[str] = []
        pieces: list[bytes] = []
        refs: list[ArrayRef] = []
        with anyio.fail_after(30):
            async for item in receiver.items():
                if isinstance(item, BlobChunk):
                    order.append(item.request)
                    if item.request == "big":
                        pieces.append(bytes(item.data))
                elif item.finishes:
                    assert item.finishes[0].manifest[0].digest == digest(values["x"])
                    break
                else:
                    order.append(f"{item.steps[0].request} step")
                    deltas = msgspec.msgpack.decode(item.steps[0].deltas, ext_hook=lambda code, data: (code, data))
                    (_, _, (code, _)) = deltas[0]
                    assert code == 5
    assert order.index("small step") < order.index("big step")
    assert order.count("big") == 16
    assert b"".join(pieces) == values["x"].numpy().tobytes()
    assert budget.reserved == 0


async def test_an_adapter_that_lags_makes_the_sender_wait_and_not_the_model(tmp_path: Path) -> None:
    budget = LargeArrayBudget(1000)
    nbytes = 64 * CHUNK_BYTES
    async with link(tmp_path) as (sender, receiver):
        tracker = SaveTracker(budget)
        # Nobody receives, and this returns.
        reported(sender, tracker, "r", {"x": torch.zeros(nbytes, dtype=torch.uint8)})
        assert budget.reserved == nbytes
        count = 0
        with anyio.fail_after(30):
            async for item in receiver.items():
                if isinstance(item, Report):
                    break
                count += 1
        assert count == 64


async def test_what_cannot_be_read_fails_its_own_trace(tmp_path: Path) -> None:
    budget = LargeArrayBudget(1000)
    async with link(tmp_path) as (sender, receiver):
        bad, good = SaveTracker(budget), SaveTracker(budget)
        bad.step({"x": large()})
        bad.taken[0]._frozen = None
        sender.step(StepRecord("bad", 0, 0, msgspec.Raw(b"\x90")), [], bad.taken)
        sender.finish(FinishRecord("bad", 0, msgspec.Raw(b"\x90")), None, lambda manifest: None)
        reported(sender, good, "good", {"x": large()})
        seen: dict[str, Any] = {}
        with anyio.fail_after(30):
            async for item in receiver.items():
                if isinstance(item, Report):
                    for record in (*item.steps, *item.finishes):
                        seen[record.request, type(record).__name__] = record
                if len(seen) == 3:
                    break
    assert "could not be read" in seen["bad", "FinishRecord"].error.message
    assert seen["good", "StepRecord"].deltas != b"\x90"
    assert budget.reserved == 0


# --- large variables --------------------------------------------------------------------------------------------------


def submission(trace: str, variables: Any = None, live: Any = None) -> Submission:
    return Submission(
        trace=trace,
        model="demo",
        invokes=[Invoke(prompt="x")],
        block=Block(name="b", source="pass", variables=pack(variables or {})),
        live=pack(live or {}),
    )


async def test_variables_are_files_for_as_long_as_a_trace_uses_them(bus: Bus, tmp_path: Path) -> None:
    value = np.random.default_rng(0).random((1000, 300), dtype=np.float32)
    refs = {trace: await bus.blobs.store(trace, value, "w") for trace in "ab"}
    inputs = Inputs(bus.blobs, tmp_path)
    path = input_path(tmp_path, refs["a"])
    async with inputs.of(submission("a", {"w": [refs["a"], 1]})):
        async with inputs.of(submission("b", {}, {"w": refs["b"]})):
            assert [file.name for file in tmp_path.iterdir()] == [path.name]
            assert path.stat().st_mode & 0o077 == 0
            first = to_tensors([refs["a"]], torch.device("cpu"), tmp_path)[0]
            second = to_tensors(refs["b"], torch.device("cpu"), tmp_path)
            first.add_(1)
            assert equal(second, value)
        assert path.exists()
    assert not list(tmp_path.iterdir())
    # What is mapped stays.
    assert equal(first, value + 1)


async def test_a_missing_variable_is_a_rejection_that_names_it(bus: Bus, tmp_path: Path) -> None:
    kept = await bus.blobs.store("t", np.ones(10), "kept")
    lost = ArrayRef("float32", (100_000,), bytes(16), "lost", "lost")
    inputs = Inputs(bus.blobs, tmp_path)
    with pytest.raises(Rejection) as caught:
        async with inputs.of(submission("t", variables={"kept": kept, "lost": [lost]})):
            pytest.fail("it ran")
    assert caught.value.failure.field == "variables.lost"
    assert "cannot be fetched" in caught.value.failure.message
    assert not list(tmp_path.iterdir())


async def test_a_submission_that_cannot_be_decoded_is_left_to_the_workers(bus: Bus, tmp_path: Path) -> None:
    async with Inputs(bus.blobs, tmp_path).of(Submission(trace="t", model="m", invokes=[], live=b"\xc1")):
        pass
    async with Inputs(bus.blobs, tmp_path).of(Submission(trace="t", model="m", invokes=[], live=pack([1]))):
        pass
