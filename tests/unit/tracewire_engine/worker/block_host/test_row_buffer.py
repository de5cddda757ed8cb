"""Memory for rows on their way to and from hosts."""

from __future__ import annotations

import pytest
import torch

from tracewire_engine.worker.block_host import row_buffer
from tracewire_engine.worker.block_host.row_buffer import RowBuffer


def test_tensors_lie_where_they_were_copied_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_buffer, "_VIEWS", 2)
    buffer = RowBuffer(1 << 12, pinned=False)
    values = [torch.full((2, 3), float(place), dtype=torch.bfloat16) for place in range(5)]
    for place, value in enumerate(values):
        buffer.copy(value, 64 * place)
    for place, value in enumerate(values):
        assert torch.equal(buffer.tensor(torch.bfloat16, torch.Size([2, 3]), 64 * place), value)
        assert buffer.array[64 * place : 64 * place + 12].tobytes() == value.view(torch.uint8).numpy().tobytes()


def test_a_buffer_is_kept_unless_it_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowBuffer, "_free", {})
    monkeypatch.setattr(row_buffer, "MOST_KEPT", 2 << 20)
    small, large = RowBuffer.take(10, pinned=False), RowBuffer.take((2 << 20) + 1, pinned=False)
    assert (small.size, large.size) == (1 << 20, 4 << 20)
    small.give_back()
    large.give_back()
    assert RowBuffer.take(1 << 20, pinned=False) is small
    assert RowBuffer.take((2 << 20) + 1, pinned=False) is not large


def test_what_was_made_in_inference_mode_can_be_written_outside_it() -> None:
    """In vLLM the model runs in inference mode, but the rows of earlier stages come outside it."""
    with torch.inference_mode():
        buffer = RowBuffer(1 << 12, pinned=False)
        buffer.copy(torch.zeros(4), 0)
    buffer.copy(torch.ones(4), 0)
    with torch.inference_mode():
        buffer.copy(torch.full((4,), 2.0), 0)
    assert buffer.tensor(torch.float32, torch.Size([4])).tolist() == [2.0] * 4
