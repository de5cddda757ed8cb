"""The first of two stages does for the hosts of the last one what one stage would do: all comes to the same.

So do stages of two ranks each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from tests.support.hosted_model import HostedModel
from tests.support.hosted_ranks import linked
from tests.support.hosted_stages import HostedStages, RankedStages, stages
from tests.unit.tracewire_engine.worker.block_host.test_equal_to_inline import BLOCKS, ended, plain, run
from tracewire_bus.wire.messages import Block
from tracewire_engine.protocol.block_host import Reply, Shape
from tracewire_engine.protocol.keys import BLOCK_ARG
from tracewire_engine.worker.block_host.rank_link import Edit, Served, StepWatch
from tracewire_engine.worker.block_host.rows import StepSpans
from tracewire_engine.worker.blocks.live_params import LiveRun

EACH = "for step in tracer.iter[:]:\n    "
READS = {
    "both": "seen = [].save()\n"
    + EACH
    + "seen.append(model.model.layers[0].output[0] + model.model.layers[2].output[1])\n",
    "early": "seen = [].save()\n" + EACH + "seen.append(model.model.layers[1].input.sum())\n",
    "late": "seen = [].save()\n" + EACH + "seen.append(model.logits.clone())\n",
}


@pytest.fixture(scope="module")
def both() -> Iterator[HostedStages]:
    both = HostedStages()
    yield both
    both.close()


@pytest.mark.parametrize("chosen", [BLOCKS, READS], ids=["all", "reads"])
def test_two_stages_come_to_what_one_comes_to(chosen: dict[str, Any], both: HostedStages) -> None:
    """In one batch; reads, edits of all kinds, skips, errors and ends."""
    blocks = {name.replace(" ", "."): source for name, source in chosen.items()}
    alone = HostedModel()
    expected, drawn = run(alone, blocks)
    alone.close()
    found, sampled = both.run(blocks)
    assert sampled == drawn
    for name in blocks:
        assert (name, ended(found[name])) == (name, ended(expected[name]))
        assert (name, plain(found[name].saves)) == (name, plain(expected[name].saves))
    assert not len(both.first.hosts)


def test_no_stage_waits_for_blocks_that_only_read(both: HostedStages) -> None:
    """The first stage runs all steps before the last one begins."""
    for name, block in READS.items():
        both.open(name, block)
    steps = [dict.fromkeys(READS, 2), {"both": 1}, {"plain": 3}, {"plain": 1, "early": 1, "late": 1}]
    for index, tokens in enumerate(steps):
        both.first.step(tokens, index)
    for index, tokens in enumerate(steps):
        both.last.step(tokens, index)
    for name in READS:
        both.first.finish(name, 3)
        both.last.finish(name, 3)
    both.last.wait(*READS)
    assert [len(both.last.outcomes[name].saves["seen"]) for name in READS] == [2, 2, 2]


def test_a_stage_calls_its_modules_while_it_waits(both: HostedStages) -> None:
    calls = (
        "kept = [].save()\n"
        + EACH
        + "x = model.model.layers[1].input\n    kept.append(model.model.layers[0](x).clone())\n"
    )
    fails = EACH + "x = model.model.layers[1].input\n    kept = model.model.layers[0](x[:, :2]).clone().save()\n"
    late = EACH + "x = model.logits\n    kept = model.model.layers[0](x[:, :4]).clone().save()\n"
    weights = EACH + "x = model.model.layers[1].input\n    x[:] = model.model.layers[0].weight[0]\n"
    blocks = {"calls": calls, "fails": fails, "late": late, "weights": weights, "writes": BLOCKS["writes"]}
    alone = HostedModel()
    # A request's rows depend on its place in the batch.
    expected = run(alone, blocks)[0]
    alone.close()
    found, _ = both.run(blocks)
    for name in ("calls", "fails", "writes"):
        assert (name, ended(found[name])) == (name, ended(expected[name]))
    assert plain(found["calls"].saves) == plain(expected["calls"].saves)
    for name in ("late", "weights"):
        finish = found[name].finish
        assert finish is not None
        assert finish.error is not None
        assert (finish.error.type, finish.error.line) == ("RuntimeError", 3)
        assert "layers.0 is on pipeline stage 0: a block in a process of its own" in finish.error.message


def test_a_host_that_dies_at_an_early_location_ends_its_trace_alone(both: HostedStages) -> None:
    dies = (
        EACH + "model.model.layers[0].output[0][:] *= 2.0\n    if step == 1:\n        import os\n        os._exit(1)\n"
    )
    blocks = {"dies": dies, "writes": EACH + "model.model.layers[1].output[0][:] *= 3.0\n", **READS}
    found, drawn = both.run(blocks)
    finish = found["dies"].finish
    assert finish is not None
    assert finish.error is not None
    assert finish.error.type == "BlockHostLost"
    alone = HostedModel()
    for name in ("writes", *READS):
        assert ended(found[name])[0] == ended(run(alone, {name: blocks[name]})[0][name])[0]
    alone.close()
    assert len(drawn) == 4


@pytest.fixture(scope="module")
def ranked() -> Iterator[RankedStages]:
    ranked = RankedStages()
    yield ranked
    ranked.close()


@pytest.mark.parametrize("chosen", [BLOCKS, READS], ids=["all", "reads"])
def test_two_stages_of_two_ranks_come_to_what_one_comes_to(chosen: dict[str, Any], ranked: RankedStages) -> None:
    blocks = {name.replace(" ", "."): source for name, source in chosen.items()}
    alone = HostedModel()
    expected, drawn = run(alone, blocks)
    alone.close()
    found, sampled = ranked.run(blocks)
    assert sampled == drawn
    for name in blocks:
        assert (name, ended(found[name])) == (name, ended(expected[name]))
        assert (name, plain(found[name].saves)) == (name, plain(expected[name].saves))
    assert not any(len(model.hosts) for model in (*ranked.firsts, ranked.second))
    assert not ranked.failed
    assert not ranked.second.failed


READS_ALL = (
    "seen = [].save()\n" + EACH + "seen.append(model.model.layers[0].output[0] + model.model.layers[2].output[1])\n"
)
WRITES = EACH + "model.model.layers[1].output[0][:] *= 2.0\n"


@pytest.mark.parametrize("kind", [HostedStages, RankedStages])
@pytest.mark.parametrize("tenants", ["one trace", "another trace of its host"])
def test_who_reads_gets_all_though_others_of_its_host_have_written(kind: Any, tenants: str) -> None:
    """In steps with the reader alone no stage waits."""
    stages = kind()
    models = [stages.first, stages.last] if kind is HostedStages else stages.all
    each: Any = ThreadPoolExecutor(4)

    def step(tokens: dict[str, int], index: int) -> None:
        list(each.map(lambda model: model.step(tokens, index), models))

    def opened(name: str, block: str, trace: str, choices: int) -> None:
        for model in models:
            model.open(name, block, trace=trace, choices=choices, tenant="x")

    def finish(name: str, tokens: int) -> None:
        for model in models:
            model.finish(name, tokens)

    try:
        if tenants == "one trace":
            opened("reads", READS_ALL, "t", 2)
        else:
            opened("reads", READS_ALL, "reads", 1)
            opened("other", READS_ALL, "t", 2)
        opened("writes", WRITES, "t", 2)
        names = ["reads", "writes"] if tenants == "one trace" else ["reads", "other", "writes"]
        step(dict.fromkeys(names, 2), 0)
        step(dict.fromkeys(names, 1), 1)
        for name in names[1:]:
            finish(name, 2)
        for index in range(2, 5):
            step({"reads": 1}, index)
        # The next step that waits goes on as the first ones.
        opened("again", WRITES, "again", 1)
        step({"reads": 1, "again": 2}, 5)
        finish("again", 1)
        step({"reads": 1}, 6)
        finish("reads", 7)
        stages.last.wait(*names, "again")
        found = stages.last.outcomes["reads"]
        assert found.finish.error is None
        assert len(found.saves["seen"]) == 7
    finally:
        each.shutdown()
        stages.close()


@pytest.mark.parametrize("block", [WRITES, READS_ALL], ids=["writes", "reads"])
def test_a_request_that_some_cannot_take_holds_none_up(block: str) -> None:
    """As one whose autoencoder has no room on its stage."""
    stages = RankedStages()
    try:
        encoded = Block(name="block", source=block, filename="mine.py", first_line=1)
        arguments = {BLOCK_ARG: msgspec.msgpack.encode(encoded)}
        for model in (stages.last, stages.firsts[1]):
            model.open("x", block)
        for model in (stages.firsts[0], stages.second):
            model.hosts.expect("x-00000000", arguments)
        for index in range(3):
            stages.each(lambda model, index=index: model.step({"x": 2 if index == 0 else 1}, index))  # type: ignore[misc]
        for model in stages.all:
            model.hosts.finish("x-00000000", 3, None, None)
            model.hosts.tell_ends()
        stages.last.wait("x")
        assert not any(model.hosts._requests.wait_in({"x-00000000": 1}) for model in (*stages.firsts, stages.second))
    finally:
        stages.close()


def _meets(models: list[HostedModel], module: Callable[[HostedModel], Any]) -> list[int]:
    """Let a module's calls wait for each other on these ranks, as a sharded one's do. Returns each rank's calls."""
    meeting, entered = threading.Barrier(len(models)), [0] * len(models)
    for rank, model in enumerate(models):
        sharded = module(model)
        sharded.tp_size, plainly = 2, sharded.forward

        def forward(x: torch.Tensor, rank: int = rank, plainly: Any = plainly) -> torch.Tensor:
            entered[rank] += 1
            meeting.wait(10)
            result: torch.Tensor = plainly(x)
            return result

        sharded.forward = forward
    return entered


def test_the_ranks_of_both_stages_run_the_sharded_modules_that_blocks_call() -> None:
    """While the earlier stage waits, its own ones and those of the last stage, which waits for the earlier one."""
    ranked = RankedStages()
    early = _meets(list(ranked.firsts), lambda model: model.module.model.layers[0])
    late = _meets([ranked.last, ranked.second], lambda model: model.module.model.norm)
    blocks = {
        "early": "k = [].save()\n"
        + EACH
        + "x = model.model.layers[1].input\n    k.append(model.model.layers[0](x).clone())\n",
        "late": "k = [].save()\n"
        + EACH
        + "x = model.model.layers[1].input\n    x[:] = model.model.norm(x)\n    k.append(x.clone())\n",
        "wrongly": EACH + "x = model.model.layers[1].input\n    model.model.layers[0](x[:, :2])\n",
    }
    try:
        alone = HostedModel()
        expected, drawn = run(alone, blocks)
        alone.close()
        # The calls of a module whose ranks wait for each other count.
        before = list(early)
        found, sampled = ranked.run(blocks)
        assert sampled == drawn
        for name in blocks:
            assert (name, ended(found[name])) == (name, ended(expected[name]))
            assert (name, plain(found[name].saves)) == (name, plain(expected[name].saves))
        assert early[0] == early[1] > before[0]
        assert late[0] == late[1] >= 4
    finally:
        ranked.close()


def test_rows_that_another_rank_of_an_earlier_stage_cannot_put_in_end_their_host() -> None:
    ranked = RankedStages()
    writes = EACH + "model.model.layers[0].output[0][:] *= 2.0\n"
    second = ranked.firsts[1].hosts
    served = second._served

    def broken(value: Any) -> Any:
        left = served(value)
        second._broken(Edit(["writes-00000000"], StepSpans([], [], 0, 0), Reply()), torch.OutOfMemoryError("no memory"))
        return left

    second._served = broken
    # As the ranks of a stage tell each other between steps.
    begin_for = ranked.firsts[0].hosts.begin_for

    def begin(*step: Any) -> bool:
        for request, failure in ranked.failed:
            assert ranked.firsts[0].hosts.fail(request, failure)
        begun: bool = begin_for(*step)
        return begun

    ranked.firsts[0].hosts.begin_for = begin
    try:
        found, _ = ranked.run({"writes": writes, **READS})
        finish = found["writes"].finish
        assert finish is not None
        assert finish.error is not None
        assert (finish.error.type, finish.error.message) == ("OutOfMemoryError", "no memory")
        assert [len(found[name].saves["seen"]) for name in READS] == [4, 4, 4]
    finally:
        ranked.close()


def test_of_a_value_that_cannot_be_shared_the_other_ranks_are_told_that_nothing_is_left() -> None:
    links = linked()
    (first, earlier), (second, _) = [stages(link) for link in links]
    block = Block(name="block", source=EACH + "model.model.layers[0].output[0][:] = 0\n", filename="a", first_line=1)
    arguments = {BLOCK_ARG: msgspec.msgpack.encode(block)}
    location = "model.model.layers.0.output"
    states = {"a": SimpleNamespace(num_computed_tokens=3, num_prompt_tokens=2)}
    earlier.tell_began(StepWatch({location: 0}))
    # Only the first rank talks to the last stage.
    assert (first._pull.closed, second._pull.closed) == (False, True)
    value = (torch.ones(1, 4), 2**70)
    for rank in (first, second):
        rank.open("a", SimpleNamespace(engine_id="a", index=0), arguments, ("a", 1, ""), [], LiveRun(""))
        assert rank.begin_for(states, {"a": 1}, ["a"])
        assert rank.reach(location, value) is value
        rank.end()
    for link in links:
        link.close()


def test_a_value_that_cannot_be_shared_costs_the_blocks_that_ask_for_it() -> None:
    forwarded, earlier = stages()
    # The last one is in no step.
    for name, source in {**READS, "rests": WRITES}.items():
        block = Block(name="block", source=source, filename="a", first_line=1)
        arguments = {BLOCK_ARG: msgspec.msgpack.encode(block)}
        forwarded.open(name, SimpleNamespace(engine_id=name, index=0), arguments, (name, 1, ""), [], LiveRun(""))
        earlier.open(name, forwarded._accounts.of(arguments))
    order = list(READS)
    assert forwarded.begin_for({}, dict.fromkeys(order, 1), order)
    value = (torch.ones(3, 4), 2**70)
    assert forwarded.reach("model.model.layers.0.output", value) is value
    forwarded.reach("model.model.layers.1.input", ((torch.ones(3, 4),), {}))
    forwarded.end()
    earlier.begin(dict.fromkeys(order, 1), order)
    reached, end = earlier.take()
    assert (reached.location, reached.passed) == ("model.model.layers.1.input", ["model.model.layers.0.output"])
    assert list(end.failures) == ["both"]
    assert (
        "model.model.layers.0.output cannot be shared: SharedValueError: an integer of" in end.failures["both"].message
    )


def test_rows_that_cannot_be_put_in_are_told_with_the_next_message(monkeypatch: pytest.MonkeyPatch) -> None:
    forwarded, earlier = stages()
    block = Block(name="block", source=EACH + "model.model.layers[0].output[0][:] = 0\n", filename="a", first_line=1)
    arguments = {BLOCK_ARG: msgspec.msgpack.encode(block)}
    forwarded.open("a", SimpleNamespace(engine_id="a", index=0), arguments, ("a", 1, ""), [], LiveRun(""))
    earlier.open("a", forwarded._accounts.of(arguments))
    location = "model.model.layers.0.output"
    # The last stage's answers, which it sends without waiting.
    earlier.waiting = 0
    earlier.tell_began(StepWatch({location: 0}))
    edit = Edit(["a"], StepSpans([(0, 1)], [0], 1, 1), Reply(edited=[(7, Shape("float32", (1, 4), 0))]))
    earlier.serve(Served([edit], StepWatch()), torch.zeros(16, dtype=torch.uint8))
    assert forwarded.begin_for({"a": SimpleNamespace(num_computed_tokens=3, num_prompt_tokens=2)}, {"a": 1}, ["a"])
    assert earlier.began() == [("a", 1, 2)]
    value = torch.ones(1, 4)
    assert forwarded.reach(location, (value, value))[0] is value
    forwarded.end()
    earlier.begin({"a": 1}, ["a"])
    reached, last = earlier.take()
    assert (reached.location, reached.waits, reached.failures) == (location, True, {})
    assert [(name, one.message) for name, one in last.failures.items()] == [("a", "the value has no tensor 7")]
