"""A ring buffer, and steps to send through it."""

from __future__ import annotations

from functools import cache

import torch

from tracewire_engine.link.shared_ring import LEAST_BYTES, Place, RingCopy
from tracewire_engine.link.step_link import LinkSender
from tracewire_engine.protocol.messages import Batch, Report
from tracewire_engine.worker.host_copy import PinnedCopy

SIZE = 16 * LEAST_BYTES


@cache
def _pattern(size: int) -> torch.Tensor:
    return (torch.arange(size, dtype=torch.int64) * 31).to(torch.uint8)


def filled(size: int, number: int) -> torch.Tensor:
    # Of uint8, the sum wraps around.
    return _pattern(size) + number % 256


def place_of(found: RingCopy | None) -> Place:
    assert found is not None
    assert found.done
    batch = Batch(0, 0)
    found.fill(batch)
    found.release()
    assert batch.place is not None
    return batch.place


def send(sender: LinkSender, step: int, tensor: torch.Tensor) -> bool:
    """As the runner does; whether the bytes were shared."""
    report = Report(1.0, batch=Batch(1, step))
    assert report.batch is not None
    copy = sender.put(tensor, report) or PinnedCopy(tensor)
    copy.fill(report.batch)
    sender.send(report)
    copy.release()
    return isinstance(copy, RingCopy)
