"""Two ranks' copies of blocks in one process, a thread each, whose model meets after each layer as ranks do."""

from __future__ import annotations

import tracewire_engine  # noqa: F401 (before nnsight, which puts its save on everything)

# isort: split
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch
from nnsight.intervention.envoy import Envoy
from nnsight.modeling.vllm.interleaver import VLLMInterleaver
from nnsight.tracing.tracer import inc

import tracewire
from tests.support.ranks import Pair
from tracewire_engine.worker.blocks import save_marks as marks
from tracewire_engine.worker.blocks import time_limit as watchdog
from tracewire_engine.worker.blocks.batched_serving import RowBatcher
from tracewire_engine.worker.blocks.compiler import BlockCache
from tracewire_engine.worker.blocks.live_params import LIVE, LiveRun
from tracewire_engine.worker.declared.hooks import DeclaredInterleaver
from tracewire_engine.worker.declared.plan import DeclaredRequests
from tracewire_engine.worker.parallel import rank_agreement as ranks
from tracewire_engine.worker.parallel.rank_agreement import BlockKey, RanksDiffer

SHARDED = "model.model.layers.1.output"


class Meeting:
    """Where a rank waits for the other, as in a collective operation; one that comes alone breaks it for both."""

    def __init__(self) -> None:
        self.barrier, self.entered = threading.Barrier(2), [0, 0]

    def enter(self, rank: int) -> None:
        """Take part in the next operation."""
        self.entered[rank] += 1
        self.barrier.wait(10)


class Layer(torch.nn.Linear):
    """A part of it is on each rank."""

    tp_size = 2

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(3, 3)
        self.meet = lambda: meeting.enter(rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's, and an operation."""
        found = super().forward(x)
        self.meet()
        return found


class Decoder(torch.nn.Module):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(meeting, rank) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All layers."""
        for layer in self.layers:
            x = layer(x)
        return x


class Root(torch.nn.Module):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = Decoder(meeting, rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The decoder's."""
        return self.model(x)


class Fragments:
    """In place of nnsight's: one location is sharded, and to make it whole takes both ranks."""

    enabled = True

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._enter = lambda: meeting.enter(rank)

    def instrument(self, envoy: Any) -> None:
        """Nothing."""

    def fragmented(self, location: str) -> bool:
        """Whether it is that one."""
        return location == SHARDED

    def whole(self, location: str, value: Any) -> Any:
        """Meet."""
        self._enter()
        return value, lambda whole: whole


class Rank:
    """One rank: the model, and its copies of a block for each of two requests."""

    def __init__(self, end: ranks.Ranks, meeting: Meeting, blocks: list[Any]) -> None:
        inc()
        self.ranks, self.model = end, Root(meeting, end.index)
        interleaver = self.interleaver = VLLMInterleaver(fragments=Fragments(meeting, end.index))
        root = Envoy(self.model, interleaver=interleaver)
        interleaver.batcher, interleaver.defer_exceptions = RowBatcher(None), True
        DeclaredInterleaver.install(interleaver, DeclaredRequests(torch.device("cpu")), self.model)
        interleaver.ranks = end
        cache = BlockCache(root, torch.device("cpu"))
        self.mediators = []
        for number, block in enumerate(blocks, 1):
            mediator = cache.mediator(msgspec.msgpack.encode(block), LiveRun(""))
            mediator.ranks, mediator.key = end, BlockKey(f"request {number}", "")
            self.mediators.append(mediator)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        """One forward pass, and its comparison."""
        interleaver = self.interleaver
        interleaver.batcher.total = len(self.mediators)
        self.ranks.begin()
        self.part()
        alive = [one for one in self.mediators if one.worker is None or one.alive]
        for row, mediator in enumerate(self.mediators):
            mediator.batch_group, mediator.row = [row, 1], row
        interleaver.mediators = [one for one in alive if one.worker is not None]
        with torch.inference_mode(), interleaver:
            for mediator in alive:
                if mediator.worker is None:
                    try:
                        mediator.start(interleaver)
                    except Exception as exception:
                        mediator.exception = exception
            interleaver.mediators = alive
            interleaver.reindex()
            interleaver.handle(LIVE, None)
            found = self.model(x)
        ended = {one.key: one.ended for one in self.mediators if one.ended and not one.compared}
        for mediator in self.mediators:
            mediator.compared |= bool(mediator.ended)
        if self.ranks.index:
            self.ranks.send_ended(ended)
        else:
            self.ranks.compare_ended(ended)
            self.part()
        return found

    def part(self) -> None:
        """End what has parted."""
        for key, error, sure in self.ranks.differing():
            for mediator in self.mediators:
                if mediator.key == key and (not mediator.ended or (sure and mediator.ended != "failed")):
                    mediator.halt(error)


def run(tmp_path: Any, *blocks: Any, steps: int = 6) -> list[Rank]:
    """Both ranks after so many steps."""
    marks.install()
    pair, meeting = Pair(f"ipc://{tmp_path}/link"), Meeting()
    threads = [ThreadPoolExecutor(1, thread_name_prefix=f"rank {rank}") for rank in (0, 1)]

    def begin(end: ranks.Ranks) -> Rank:
        return Rank(end, meeting, [block() if callable(block) else block for block in blocks])

    found = [thread.submit(begin, end).result() for thread, end in zip(threads, pair.ends, strict=True)]
    x = torch.arange(3.0 * len(blocks)).reshape(len(blocks), 3)
    for _ in range(steps):
        running = [thread.submit(rank.step, x) for thread, rank in zip(threads, found, strict=True)]
        outputs = [one.result(60) for one in running]
        assert torch.equal(*outputs)
    assert meeting.entered[0] == meeting.entered[1]
    return found


@pytest.fixture(autouse=True)
def _calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that blocks call go by the ranks of the thread's own block."""

    class ByBlock:
        def call(self, envoy: Any, forward: Any) -> Any:
            from greenlet import getcurrent

            mediator = getattr(getcurrent(), "mediator", None)
            return forward() if mediator is None else mediator().ranks.call(envoy, forward)

    monkeypatch.setattr(Envoy, "__call__", ranks._called(Envoy.__call__, ByBlock()))
    # A worker has one thread, and its limits are of one block at a time. What two threads leave there is put back.
    monkeypatch.setattr(watchdog, "_running", None)


@tracewire.intervention
def parting(model, tracer, live, how, who, where):
    import threading

    mine = threading.current_thread().name.startswith(f"rank {who}")
    for step in tracer.iter[:]:
        if step == 2 and mine:
            if how == "raises":
                raise KeyError("only here")
            if how == "stops":
                tracer.stop()
            if how == "ends":
                break
        if where == "whole":
            model.model.layers[0].output
        if where == "sharded":
            model.model.layers[1].output
        if where == "called":
            hidden = model.model.layers[0].output
            model.model.layers[2](hidden.clone())


@tracewire.intervention
def watching(model, tracer, live):
    seen = [].save()
    for _ in tracer.iter[:]:
        hidden = model.model.layers[1].output
        seen.append(model.model.layers[3](hidden.clone()).clone())


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("where", ["whole", "sharded", "called"])
@pytest.mark.parametrize("how", ["raises", "stops", "ends"])
def test_who_ends_on_one_rank_only_leaves_nobody_waiting(tmp_path: Any, how: str, where: str, who: int) -> None:
    first, second = run(tmp_path, parting(how=how, who=who, where=where).block(), watching.block())
    for rank in (first, second):
        other = rank.mediators[1]
        assert other.exception is None
        assert len(marks.saved(other)["seen"]) == 6
    if who == 1 or how == "ends":
        assert isinstance(first.mediators[0].exception, RanksDiffer)
        assert "rank 1 of 2" in str(first.mediators[0].exception)
    else:
        # Its own end is what the first rank reports.
        assert first.mediators[0].ended == {"raises": "failed", "stops": "stopped"}[how]


def test_what_all_ranks_do_is_no_difference(tmp_path: Any) -> None:
    for rank in run(tmp_path, watching.block(), watching.block()):
        assert [one.exception for one in rank.mediators] == [None, None]
        assert [len(marks.saved(one)["seen"]) for one in rank.mediators] == [6, 6]
