"""Copies of a block in one process, each beside its own part of a model, and fed from each other's logs."""

from __future__ import annotations

import tracewire_engine  # noqa: F401 (before nnsight, which puts its save on everything)

# isort: split
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from nnsight.intervention.envoy import Envoy
from nnsight.modeling.vllm.interleaver import VLLMInterleaver
from nnsight.tracing.tracer import inc
from vllm.model_executor.models.utils import PPMissingLayer

import tracewire
from tracewire_engine.worker.blocks import save_marks as marks
from tracewire_engine.worker.blocks.batched_serving import RowBatcher
from tracewire_engine.worker.blocks.compiler import BlockCache
from tracewire_engine.worker.blocks.live_params import LIVE, LiveRun
from tracewire_engine.worker.declared.hooks import DeclaredInterleaver
from tracewire_engine.worker.declared.plan import DeclaredRequests
from tracewire_engine.worker.parallel.staged_mediator import StagedMediator, StagesDiffer
from tracewire_engine.worker.parallel.topology import OtherStage, Topology, described

LAYERS = 4


class Decoder(torch.nn.Module):
    """Some layers of four, the last of which only a stage of its own has."""

    def __init__(self, own: range) -> None:
        super().__init__()
        made = [torch.nn.Linear(3, 3) for _ in range(LAYERS)]
        self.layers = torch.nn.ModuleList([made[n] if n in own else PPMissingLayer() for n in range(LAYERS)])
        self.own = own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layers that are here."""
        for n in self.own:
            x = self.layers[n](x)
        return x


class Root(torch.nn.Module):
    """As vLLM's models are: the decoder is one part."""

    def __init__(self, own: range) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = Decoder(own)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The decoder's."""
        return self.model(x)


class Copy:
    """One stage: its part of the model, and its copy of the block."""

    def __init__(self, own: range, block: Any) -> None:
        self.model, self.block = Root(own), block
        self.mediator: StagedMediator
        #: What it served in the last step.
        self.said: list[Any] = []

    def open(self, topology: Topology) -> None:
        """Complete it."""
        topology.complete(self.model)
        interleaver = self.interleaver = VLLMInterleaver()
        root = Envoy(self.model, interleaver=interleaver)
        interleaver.batcher, interleaver.defer_exceptions = RowBatcher(None), True
        DeclaredInterleaver.install(interleaver, DeclaredRequests(torch.device("cpu")), self.model)
        interleaver.topology, interleaver.elsewhere = topology, topology.elsewhere
        topology.adopt(root)
        blocks = BlockCache(root, torch.device("cpu"), kind=StagedMediator)
        self.mediator = blocks.mediator(msgspec.msgpack.encode(self.block), LiveRun(""))
        self.mediator.name("a request")

    def step(self, x: torch.Tensor, fed: Callable[[], None] | None = None) -> torch.Tensor:
        """One forward pass, once the copy has been told what the others served in it."""
        mediator, interleaver = self.mediator, self.interleaver
        interleaver.batcher.total = x.shape[0]
        mediator.batch_group, mediator.row = [0, x.shape[0]], 0
        interleaver.mediators = [] if mediator.worker is None else [mediator]
        with torch.inference_mode(), interleaver:
            if mediator.worker is None:
                try:
                    mediator.start(interleaver)
                except Exception as exception:
                    mediator.exception = exception
                interleaver.mediators = [mediator]
            mediator.begin_step()
            interleaver.reindex()
            interleaver.handle(LIVE, None)
            if fed is not None:
                fed()
                interleaver.reindex()
            return self.model(x)

    def tell(self) -> None:
        """Its part of the step is over."""
        self.said = list(self.mediator.log)
        self.mediator.log.clear()

    def told_by(self, others: list[Copy]) -> None:
        """Feed it what others have served."""
        for other in others:
            self.mediator.incoming.extend(deepcopy(other.said))
        for _ in range(sum(len(other.said) for other in others)):
            self.mediator.feed()


def run(block: Any, steps: int = 3, stages: int = 2) -> tuple[list[torch.Tensor], list[Copy]]:
    """The model's outputs, on so many stages, and the stages."""
    inc()
    marks.install()
    size = LAYERS // stages
    copies = [Copy(range(first, first + size), block) for first in range(0, LAYERS, size)]
    trees = [described(copy.model) for copy in copies]
    for index, copy in enumerate(copies):
        copy.open(Topology(index, trees))
    outputs = []
    for step in range(steps):
        x = torch.arange(6.0).reshape(2, 3) + step
        # As they are told before the step: nobody has done anything of it.
        before = [copies[index + 1 :] for index in range(stages)]
        for copy, later in zip(copies, before, strict=True):
            if step:
                with torch.inference_mode(), copy.interleaver:
                    copy.interleaver.topology.catching_up = True
                    copy.told_by(later)
                    copy.interleaver.topology.catching_up = False
        for index, copy in enumerate(copies):
            x = copy.step(x, partial(copy.told_by, copies[:index]))
            copy.tell()
        outputs.append(x)
    return outputs, copies


def saves(copy: Copy) -> dict[str, Any]:
    return marks.saved(copy.mediator)


@tracewire.intervention
def reads(model, tracer, live):
    """All layers, in order, in every step."""
    seen = [].save()
    for step in tracer.iter[:]:
        for layer in range(4):
            seen.append(model.model.layers[layer].output.clone())
        seen.append(model.model.output.clone())


@tracewire.intervention
def edits(model, tracer, live):
    """Edits on both stages, from each other's values."""
    seen = [].save()
    push = 0.0
    for step in tracer.iter[:]:
        early = model.model.layers[0].output
        early[:] += push
        kept = early.clone()
        model.model.layers[2].output = model.model.layers[2].output * 2 + kept
        seen.append(model.model.layers[3].output.clone())
        push = float(seen[-1].mean())


@tracewire.intervention
def calls(model, tracer, live):
    """Calls a module of each stage."""
    seen = [].save()
    for step in tracer.iter[:]:
        early = model.model.layers[0].output.clone()
        seen.append(model.model.layers[1](early).clone())
        seen.append(model.model.layers[3](early).clone())
        seen.append(model.model.layers[2].output.clone())


@tracewire.intervention
def cached(model, tracer, live):
    """What passes on both."""
    cache = tracer.cache(modules=["model.model.layers.1", "model.model.layers.2"])
    model.model.output
    for step in tracer.iter[1:]:
        model.model.output


@tracewire.intervention
def noise(model, tracer, live):
    """Random numbers on the way."""
    seen = [].save()
    for step in tracer.iter[:]:
        model.model.layers[0].output[:] += torch.randn(2, 3)
        seen.append(model.model.layers[3].output.clone())


@pytest.mark.parametrize(
    ("block", "stages"),
    [(reads, 2), (reads, 4), (edits, 2), (edits, 4), (noise, 2), (noise, 4), (calls, 2)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_copies_do_what_one_does(block: Any, stages: int) -> None:
    outputs, copies = run(block.block(), stages=stages)
    expected, (alone,) = run(block.block(), stages=1)
    for mine, theirs in zip(outputs, expected, strict=True):
        assert torch.equal(mine, theirs)
    ours, whole = saves(copies[-1])["seen"], saves(alone)["seen"]
    assert len(ours) == len(whole) > 0
    assert all(map(torch.equal, ours, whole))
    assert [copy.mediator.exception for copy in copies] == [None] * stages


def test_a_cache_sees_all_stages() -> None:
    _, copies = run(cached.block())
    for path in ("model.model.layers.1", "model.model.layers.2"):
        entries = copies[-1].mediator.caches[0].entries[path]
        assert len(entries) == 3


@tracewire.intervention
def calls_back(model, tracer, live):
    """Calls an earlier stage's module too late."""
    late = model.model.layers[2].output
    again = model.model.layers[0](late)


@tracewire.intervention
def too_late(model, tracer, live):
    """Waits for a later stage's module, and asks for what has passed."""
    early = model.model.layers[0].output
    late = model.model.layers[2](early)
    passed = model.model.layers[1].output


@tracewire.intervention
def weight(model, tracer, live):
    """Reads a weight that one stage has."""
    early = model.model.layers[0].output
    shape = list(model.model.layers[3].weight.shape).save()


def test_a_call_of_the_last_stage_is_too_late_for_one_between() -> None:
    _, copies = run(calls.block(), stages=4)
    assert isinstance(copies[2].mediator.exception, OtherStage)
    assert "model.layers.2.output is on pipeline stage 2" in str(copies[2].mediator.exception)


@pytest.mark.parametrize(
    ("block", "stage", "words"),
    [
        (calls_back, 1, "finished its part of this step"),
        (too_late, 0, "the model had passed it before model.layers.2"),
        (weight, 0, r"model.layers.3.weight is on pipeline stage 1 only"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_is_refused_at_the_blocks_line(block: Any, stage: int, words: str) -> None:
    _, copies = run(block.block(), steps=2)
    exception = copies[stage].mediator.exception
    assert isinstance(exception, OtherStage)
    assert words in str(exception)


def test_a_copy_that_parts_from_its_log_fails_where_it_waits() -> None:
    block = reads.block()
    _, (first, last) = run(block, steps=1)
    with torch.inference_mode(), first.interleaver:
        first.interleaver.topology.catching_up = True
        wrong = [entry for entry in last.said if "layers.3" in entry.location]
        first.mediator.incoming.extend(wrong)
        first.mediator.feed()
    assert isinstance(first.mediator.exception, StagesDiffer)
    assert "layers.2.output" in str(first.mediator.exception)
    assert "layers.3.output" in str(first.mediator.exception)
    assert not first.mediator.incoming
    assert first.mediator.over
