"""Two tensor-parallel ranks in one process, of which the first runs blocks in hosts and the second follows it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from nnsight.intervention.envoy import Envoy

from tests.support.hosted_model import HostedModel, Model, Outcome
from tracewire_bus.wire.messages import Failure
from tracewire_engine.worker.block_host.accounts import Accounts
from tracewire_engine.worker.block_host.followed_blocks import FollowedBlocks
from tracewire_engine.worker.block_host.rank_link import RankLink
from tracewire_engine.worker.parallel import rank_sockets

__all__ = ["FollowingModel", "HostedRanks", "linked"]


def linked(kind: Callable[[Any, str], Any] = RankLink, ranks: int = 2) -> list[Any]:
    """The ends of ranks that are connected. `kind` makes one, of its group and an address."""
    addresses = [""] * ranks
    all_there = threading.Barrier(ranks)

    def gather(mine: str, group: Any) -> list[str]:
        addresses[group.rank] = mine
        all_there.wait(30)
        return addresses

    groups = [SimpleNamespace(rank_in_group=rank, rank=rank, world_size=ranks) for rank in range(ranks)]
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(ranks) as threads:
        patch.setattr(rank_sockets, "gathered", gather)
        return list(threads.map(lambda group: kind(group, ""), groups))


class FollowingModel(HostedModel):
    """The second rank's model."""

    def __init__(self, link: RankLink, *, layers: int = 3, accounts: Accounts | None = None) -> None:
        self.module, self.outcomes = Model(layers), {}
        self.failed: list[tuple[str, Failure]] = []
        self.envoy = Envoy(self.module)
        followed: Any = FollowedBlocks(self.envoy, link, lambda *what: self.failed.append(what), accounts)
        self.hosts = followed

    def _begin(self, scheduled: dict[str, int], index: int) -> Callable[..., Any]:
        self.hosts.begin_for({}, scheduled, list(scheduled))
        return self.hosts.reach if self.hosts.active else lambda location, value, **_: value


class HostedRanks:
    """Both ranks, which do the same at the same time."""

    def __init__(self, **options: Any) -> None:
        self.links: list[RankLink] = linked()
        self.first = HostedModel(others=self.links[0], **options)
        self.second = FollowingModel(self.links[1], layers=options.get("layers", 3))
        self._threads = ThreadPoolExecutor(2)

    def both(self, do: Callable[[HostedModel], Any]) -> list[Any]:
        """What each rank returns."""
        under_way = [self._threads.submit(do, model) for model in (self.first, self.second)]
        return [one.result(60) for one in under_way]

    def open(self, name: str, block: str, **more: Any) -> None:
        """Take a request with a block."""
        self.both(lambda model: model.open(name, block, **more))

    def step(self, tokens: Mapping[str, int], index: int) -> list[list[int]]:
        """Run one step of the model. Returns the samples of each rank."""
        return [samples.flatten().tolist() for samples in self.both(lambda model: model.step(tokens, index))]

    def run(self, blocks: Mapping[str, str], steps: int = 4) -> tuple[dict[str, Outcome], list[list[int]]]:
        """Run blocks in one batch to their ends. Returns what they come to, and the samples, the same on both ranks."""
        for name, block in blocks.items():
            self.open(name, block)
        drawn = []
        for index in range(steps):
            one, other = self.step(dict.fromkeys(blocks, 2 if index == 0 else 1), index)
            assert one == other, f"step {index}"
            drawn.append(one)
        for name in blocks:
            self.both(lambda model, name=name: model.finish(name, steps))  # type: ignore[misc]
        self.first.wait(*blocks)
        return {name: self.first.outcomes[name] for name in blocks}, drawn

    def close(self) -> None:
        """End all hosts, and the connection."""
        self._threads.shutdown()
        self.first.close()
        for link in self.links:
            link.close()
