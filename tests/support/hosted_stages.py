"""Two pipeline stages in one process: the second has the hosts of blocks, and the first sends it what they ask for."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
from nnsight.intervention.envoy import Envoy

from tests.support.hosted_model import HIDDEN, HostedModel, Model, Outcome
from tests.support.hosted_ranks import linked
from tracewire_engine.worker.block_host.accounts import Accounts
from tracewire_engine.worker.block_host.earlier_stages import EarlierStages
from tracewire_engine.worker.block_host.forwarded_blocks import ForwardedBlocks
from tracewire_engine.worker.block_host.reading import ModelPaths
from tracewire_engine.worker.block_host.setup import outline_of

__all__ = ["FirstStage", "HostedStages", "LastStage", "stages"]


def stages(ranks: int = 1, layers: int = 3) -> tuple[ForwardedBlocks, EarlierStages]:
    """The ends of two stages that are connected, each with so many tensor-parallel ranks."""
    module = Model(layers)
    paths = ModelPaths(outline_of(module), "model.layers")

    def end(group: Any, address: str) -> Any:
        if group.rank_in_group:
            return EarlierStages(group, address, ranks)
        tensor_parallel = SimpleNamespace(rank_in_group=0, world_size=ranks)
        return ForwardedBlocks(Envoy(module), Accounts(paths), group, address, tensor_parallel)

    forwarded, earlier = linked(end)
    return forwarded, earlier


def _states(scheduled: Mapping[str, int], index: int) -> dict[str, Any]:
    return {
        name: SimpleNamespace(num_computed_tokens=index - count, num_prompt_tokens=0)
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
        active = self.hosts.begin_for(_states(scheduled, index), scheduled, list(scheduled))
        reach = self.hosts.reach if active else lambda location, value, **_: value
        total = sum(scheduled.values())
        x = torch.linspace(-1, 1, total * HIDDEN).view(total, HIDDEN) + index
        with torch.inference_mode():
            x = self._layers(x.clone(), reach, slice(2))
        self.hosts.end()
        self.passed_on.put(x)
        return x


class LastStage(HostedModel):
    """The last layer, and the head."""

    def __init__(self, earlier: EarlierStages, passed_on: queue.SimpleQueue[torch.Tensor], **options: Any) -> None:
        super().__init__(earlier=earlier, **options)
        for layer in self.module.model.layers[:2]:
            # As the stand-ins of a worker have it.
            vars(layer)["tracewire_stage"] = 0
        self._given = passed_on

    def step(self, tokens: Mapping[str, int], index: int) -> Any:
        scheduled = {f"{name}-00000000": count for name, count in tokens.items()}
        self.hosts.begin_ahead(scheduled)
        x = self._given.get(timeout=60)
        active = self.hosts.begin_for(_states(scheduled, index), scheduled, list(scheduled))
        reach = self.hosts.reach if active else lambda location, value, **_: value
        with torch.inference_mode():
            samples = self._head(self._layers(x, reach, slice(2, None)), scheduled, reach)
        self.hosts.end()
        return samples


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
