"""Tensor-parallel ranks as threads of one process, for what runs on each rank and adds up tensors of all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

__all__ = ["on_ranks"]

T = TypeVar("T")
_PATIENCE_S = 60.0


def on_ranks(count: int, run: Callable[[int, Callable[[torch.Tensor], torch.Tensor]], T]) -> list[T]:
    """What `run(rank, add)` returns on each rank. `add` adds up a tensor of all ranks, which all must call alike."""
    barrier, given = threading.Barrier(count), [torch.empty(0)] * count

    def on(rank: int) -> T:
        def add(mine: torch.Tensor) -> torch.Tensor:
            given[rank] = mine
            barrier.wait(_PATIENCE_S)
            assert all(one.shape == mine.shape for one in given)
            total = torch.stack(given).sum(0)
            barrier.wait(_PATIENCE_S)
            return total

        try:
            return run(rank, add)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as threads:
        return [one.result() for one in [threads.submit(on, rank) for rank in range(count)]]
