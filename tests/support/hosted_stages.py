"""Two pipeline stages in one process: the second has the hosts of blocks, and the first sends it what they ask for.

Each stage may have two tensor-parallel ranks, which do the same.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
from nnsight.intervention.envoy import Envoy

from tests.support.hosted_model import HIDDEN, HostedModel, Model, Outcome
from tests.support.hosted_ranks import FollowingModel, linked
from tracewire_bus.wire.messages import Failure
from tracewire_engine.worker.block_host.accounts import Accounts
from tracewire_engine.worker.block_host.earlier_stages import EarlierStages
from tracewire_engine.worker.block_host.forwarded_blocks import ForwardedBlocks
from tracewire_engine.worker.block_host.rank_link import RankLink
from tracewire_engine.worker.block_host.reading import ModelPaths
from tracewire_engine.worker.block_host.setup import outline_of

__all__ = ["FirstStage", "HostedStages", "LastStage", "RankedStages", "stages"]


def _accounts(module: Model) -> Accounts:
    return Accounts(ModelPaths(outline_of(module), "model.layers"))


def stages(
    ranks: RankLink | None = None, fail: Callable[[str, Failure], None] | None = None, layers: int = 3
) -> tuple[ForwardedBlocks, EarlierStages]:
    """The ends of two stages that are connected. `ranks` and `fail` are those of `ForwardedBlocks`."""
    module = Model(layers)

    def end(group: Any, address: str) -> Any:
        if group.rank_in_group:
            return EarlierStages(group, address)
        return ForwardedBlocks(Envoy(module), _accounts(module), group, address, ranks, fail)

    forwarded, earlier = linked(end)
    return forwarded, earlier


def _states(scheduled: Mapping[str, int], index: int, began: dict[str, int]) -> dict[str, Any]:
    """How far requests are in a step. `began` has the first step of each: it samples the request's token 0."""
    return {
        name: SimpleNamespace(num_computed_tokens=index - began.setdefault(name, index) - count, num_prompt_tokens=0)
        for name, count in scheduled.items()
    }


class FirstStage(HostedModel):
    """The first two of three layers."""

    def __init__(self, hosts: ForwardedBlocks) -> None:
        self.module, self.outcomes = Model(3), {}
        self.envoy = Envoy(self.module)
        given: Any = hosts
        self.hosts = given
        self.passed_on: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()

    def step(self, tokens: Mapping[str, int], index: int) -> Any:
        scheduled = {f"{name}-00000000": count for name, count in tokens.items()}
        active = self.hosts.begin_for(_states(scheduled, index, self.began), scheduled, list(scheduled))
        reach = self.hosts.reach if active else lambda location, value, **_: value
        total = sum(scheduled.values())
        x = torch.linspace(-1, 1, total * HIDDEN).view(total, HIDDEN) + index
        with torch.inference_mode():
            x = self._layers(x.clone(), reach, slice(2))
        self.hosts.end()
        self.passed_on.put(x)
        return x


class _Last(HostedModel):
    _given: queue.SimpleQueue[torch.Tensor]

    def _stand_in(self) -> None:
        for layer in self.module.model.layers[:2]:
            # As the stand-ins of a worker have it.
            vars(layer)["tracewire_stage"] = 0

    def step(self, tokens: Mapping[str, int], index: int) -> Any:
        scheduled = {f"{name}-00000000": count for name, count in tokens.items()}
        self.hosts.begin_ahead(scheduled)
        x = self._given.get(timeout=60)
        active = self.hosts.begin_for(_states(scheduled, index, self.began), scheduled, list(scheduled))
        reach = self.hosts.reach if active else lambda location, value, **_: value
        with torch.inference_mode():
            samples = self._head(self._layers(x, reach, slice(2, None)), scheduled, reach)
        self.hosts.end()
        return samples


class LastStage(_Last):
    """The last layer, and the head."""

    def __init__(self, earlier: EarlierStages, passed_on: queue.SimpleQueue[torch.Tensor], **options: Any) -> None:
        super().__init__(earlier=earlier, **options)
        self._stand_in()
        self._given = passed_on


class FollowingLastStage(FollowingModel, _Last):
    """The second rank of the last stage."""

    def __init__(self, link: RankLink, passed_on: queue.SimpleQueue[torch.Tensor]) -> None:
        super().__init__(link, accounts=_accounts(Model(3)))
        self._stand_in()
        self._given = passed_on


class HostedStages:
    """Both stages, each on a thread of its own."""

    def __init__(self, **options: Any) -> None:
        forwarded, earlier = stages()
        self.first = FirstStage(forwarded)
        self.last = LastStage(earlier, self.first.passed_on, **options)
        self._threads = ThreadPoolExecutor(2)

    def open(self, name: str, block: Any, **more: Any) -> None:
        """Take a request with a block."""
        for stage in (self.first, self.last):
            stage.open(name, block, **more)

    def step(self, tokens: Mapping[str, int], index: int) -> list[int]:
        """Run one step of the model. Returns the samples."""
        first = self._threads.submit(self.first.step, tokens, index)
        samples: list[int] = self._threads.submit(self.last.step, tokens, index).result(60).flatten().tolist()
        first.result(60)
        return samples

    def run(self, blocks: Mapping[str, Any], steps: int = 4) -> tuple[dict[str, Outcome], list[list[int]]]:
        """Run blocks in one batch to their ends. Returns what they come to, and the samples."""
        for name, block in blocks.items():
            self.open(name, block)
        drawn = [self.step(dict.fromkeys(blocks, 2 if index == 0 else 1), index) for index in range(steps)]
        for name in blocks:
            for stage in (self.first, self.last):
                stage.finish(name, steps)
        self.last.wait(*blocks)
        return {name: self.last.outcomes[name] for name in blocks}, drawn

    def close(self) -> None:
        """End all hosts."""
        self._threads.shutdown()
        self.last.close()


class RankedStages:
    """Both stages with two ranks each, on four threads."""

    def __init__(self, **options: Any) -> None:
        self.failed: list[tuple[str, Failure]] = []
        early, late = linked(), linked()
        firsts = [stages(link, lambda *what: self.failed.append(what)) for link in early]
        self.firsts = [FirstStage(forwarded) for forwarded, _ in firsts]
        self.last = LastStage(firsts[0][1], self.firsts[0].passed_on, others=late[0], **options)
        self.second = FollowingLastStage(late[1], self.firsts[1].passed_on)
        self._links = [*early, *late]
        self._threads = ThreadPoolExecutor(4)

    @property
    def all(self) -> list[HostedModel]:
        """All ranks, the last one of which has the hosts."""
        return [*self.firsts, self.second, self.last]

    def each(self, do: Callable[[HostedModel], Any]) -> list[Any]:
        """What each rank returns."""
        under_way = [self._threads.submit(do, model) for model in self.all]
        return [one.result(60) for one in under_way]

    def run(self, blocks: Mapping[str, Any], steps: int = 4) -> tuple[dict[str, Outcome], list[list[int]]]:
        """Run blocks in one batch to their ends. Returns what they come to, and the samples, the same on both ranks."""
        for name, block in blocks.items():
            self.each(lambda model, name=name, block=block: model.open(name, block))  # type: ignore[misc]
        drawn = []
        for index in range(steps):
            tokens = dict.fromkeys(blocks, 2 if index == 0 else 1)
            *_, other, one = self.each(lambda model, tokens=tokens, index=index: model.step(tokens, index))  # type: ignore[misc]
            assert torch.equal(one, other), f"step {index}"
            drawn.append(one.flatten().tolist())
        for name in blocks:
            self.each(lambda model, name=name: model.finish(name, steps))  # type: ignore[misc]
        self.last.wait(*blocks)
        return {name: self.last.outcomes[name] for name in blocks}, drawn

    def close(self) -> None:
        """End all hosts, and the connections of ranks."""
        self._threads.shutdown()
        self.last.close()
        for link in self._links:
            link.close()
