"""Large arrays reach the adapter in chunks, ahead of what refers to them."""

from __future__ import annotations

from pathlib import Path

import anyio
import msgspec
import torch

from tests.support.large_arrays import large, link, reported
from tracewire_bus.store.blobs import CHUNK_BYTES
from tracewire_bus.wire.digests import digest
from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.link.blob_receiver import BlobChunk
from tracewire_engine.protocol.messages import FinishRecord
from tracewire_engine.worker.large_arrays import LargeArrayBudget
from tracewire_engine.worker.save_tracker import SaveTracker


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
