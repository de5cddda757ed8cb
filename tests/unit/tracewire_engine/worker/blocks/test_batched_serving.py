"""What blocks are handed is nnsight's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tracewire_engine  # noqa: F401 (before nnsight)
from tracewire_engine.worker.blocks.batched_serving import RowBatcher


def test_a_value_that_is_none_is_handed_on() -> None:
    batcher = RowBatcher(None)
    batcher.total, batcher.counts = 2, [1, 1]
    batcher.begin(None)
    assert batcher.rows(None, SimpleNamespace(row=1, batch_group=[1, 1])) is None


@pytest.mark.parametrize("inference", [True, False])
def test_blocks_are_handed_the_rows_that_nnsight_would_narrow(inference: bool) -> None:
    counts = [3, 1, 2]
    with torch.inference_mode(inference):
        values = [
            torch.randn(6, 4),
            (torch.randn(6, 4), torch.randn(6)),
            (torch.randn(6, 4), None),
            (torch.randn(1, 6, 4), torch.randn(6)),
            torch.randn(5, 4),
            [torch.randn(6)],
            (),
            None,
        ]
        for value in values:
            batcher = RowBatcher(None)
            batcher.total, batcher.counts = 6, counts
            batcher.begin(value)
            start = 0
            for row, count in enumerate(counts):
                group = [start, count]
                served = batcher.rows(value, SimpleNamespace(row=row, batch_group=group))
                narrowed = batcher.narrow(value, group)
                assert type(served) is type(narrowed)
                for mine, nnsights in zip(_tensors(served), _tensors(narrowed), strict=True):
                    assert torch.equal(mine, nnsights)
                    # The same memory: what a block changes in place is what the model goes on with.
                    assert mine.data_ptr() == nnsights.data_ptr()
                    assert mine.stride() == nnsights.stride()
                start += count
            batcher.end()


def test_blocks_are_handed_copies_where_nnsight_would_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNSIGHT_VLLM_CLONE_READS", "1")
    with torch.inference_mode():
        value = torch.randn(6, 4)
        batcher = RowBatcher(None)
        batcher.total, batcher.counts = 6, [3, 1, 2]
        batcher.begin(value)
        served = batcher.rows(value, SimpleNamespace(row=2, batch_group=[4, 2]))
        batcher.end()
    assert torch.equal(served, value[4:])
    assert served.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()


def test_rows_of_memory_that_is_not_of_inference_can_be_changed_in_place() -> None:
    graph = torch.zeros(8, 4)
    with torch.inference_mode():
        live = graph[:6]
        batcher = RowBatcher(None)
        batcher.total, batcher.counts = 6, [3, 1, 2]
        batcher.begin(live)
        batcher.rows(live, SimpleNamespace(row=1, batch_group=[3, 1])).add_(1)
        batcher.rows(live, SimpleNamespace(row=2, batch_group=[4, 2]))[-1].mul_(0).sub_(2)
        batcher.end()
    assert graph.sum(1).tolist() == [0, 0, 0, 4, 0, -8, 0, 0]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [item for item in (value if isinstance(value, (tuple, list)) else [value]) if item is not None]
