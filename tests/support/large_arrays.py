"""Both ends of the link for large arrays."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from tracewire_engine.link.blob_receiver import BlobReceiver
from tracewire_engine.protocol.messages import StepRecord
from tracewire_engine.worker.blob_sender import BlobSender
from tracewire_engine.worker.save_tracker import SaveTracker


def large(number: float = 0.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(1000) + number).to(dtype)


@asynccontextmanager
async def link(folder: Path) -> AsyncIterator[tuple[BlobSender, BlobReceiver]]:
    address = f"ipc://{folder}/link"
    with BlobReceiver(address) as receiver:
        yield BlobSender(address), receiver


def reported(sender: BlobSender, tracker: SaveTracker, request: str, saves: dict[str, Any], index: int = 0) -> None:
    deltas = tracker.step(saves)
    sender.step(StepRecord(request, 0, index, msgspec.Raw(b"\x90")), deltas, tracker.taken)
