"""The thread that sends large arrays waits for a slow adapter, and the model does not."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import torch

from tests.support.large_arrays import large, link, reported
from tracewire_bus.store.blobs import CHUNK_BYTES
from tracewire_engine.link.blob_receiver import BlobChunk
from tracewire_engine.protocol.messages import FinishRecord, Report, StepRecord
from tracewire_engine.worker.large_arrays import LargeArrayBudget
from tracewire_engine.worker.save_tracker import SaveTracker


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


async def test_a_piece_is_asked_for_when_its_turn_has_come(tmp_path: Path) -> None:
    asked: list[int] = []
    some = threading.Event()

    def give(number: int) -> bytes | None:
        asked.append(number)
        some.set()
        # Every tenth is not wanted any more.
        return None if number % 10 == 9 else bytes(CHUNK_BYTES)

    async with link(tmp_path) as (sender, receiver):
        for number in range(40):
            sender.relay(("r", 0), BlobChunk("r", "ab" * 8, number), partial(give, number))
        sender.relay(("r", 0), Report(time=1.0), lambda: None)
        assert await anyio.to_thread.run_sync(some.wait, 30)
        # Both ends queue eight, and the kernel holds some.
        assert len(asked) < 40
        found = []
        with anyio.fail_after(30):
            async for item in receiver.items():
                if isinstance(item, Report):
                    break
                found.append(item.number)
    assert asked == list(range(40))
    assert found == [number for number in range(40) if number % 10 != 9]
