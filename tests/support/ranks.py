"""Two tensor-parallel ranks in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from tracewire_engine.worker.parallel import rank_sockets
from tracewire_engine.worker.parallel.rank_agreement import BlockKey, Ranks

torch = pytest.importorskip("torch")


ONE, TWO = BlockKey("request 1", ""), BlockKey("request 2", "")


class Pair:
    """Two ranks, at the beginning of a step with both requests."""

    def __init__(self, address: str, limit_s: float = 0.0) -> None:
        self.threads = ThreadPoolExecutor(2)
        addresses: list[str] = ["", ""]
        all_there = threading.Barrier(2)

        def gather(mine: str, group: Any) -> list[str]:
            addresses[group.rank] = mine
            all_there.wait()
            return addresses

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rank_sockets, "gathered", gather)
            groups = [SimpleNamespace(rank_in_group=rank, rank=rank, world_size=2, cpu_group=rank) for rank in (0, 1)]
            self.ends = list(self.threads.map(lambda group: Ranks(group, address, limit_s), groups))
        for end in self.ends:
            end.requests |= {ONE.request, TWO.request}
            end.begin()

    def both(self, *what: Callable[[Ranks], Any]) -> list[Any]:
        """What each rank returns that does its part, beside the other."""
        return [
            one.result(30) for one in [self.threads.submit(do, end) for do, end in zip(what, self.ends, strict=True)]
        ]
