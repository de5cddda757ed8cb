"""The second of two ranks does with its part of the model what the first one's hosts leave: both come to the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.hosted_model import HostedModel
from tests.support.hosted_ranks import FollowingModel, HostedRanks, linked
from tests.unit.tracewire_engine.worker.block_host.test_equal_to_inline import BLOCKS, ended, plain, run
from tracewire_engine.link.shared_rows import CopiedRows
from tracewire_engine.protocol.block_host import Reply, Shared
from tracewire_engine.worker.block_host.rank_link import Edit, Served, StepBegan, StepWatch
from tracewire_engine.worker.block_host.rows import StepSpans

EACH = "for step in tracer.iter[:]:\n    "


@pytest.fixture(scope="module")
def ranks() -> Iterator[HostedRanks]:
    both = HostedRanks()
    yield both
    both.close()


def test_both_ranks_come_to_what_one_comes_to(ranks: HostedRanks) -> None:
    """All blocks in one batch; reads, edits of all kinds, skips, errors and ends."""
    blocks = {name.replace(" ", "."): source for name, source in BLOCKS.items()}
    alone = HostedModel()
    expected, drawn = run(alone, blocks)
    alone.close()
    found, sampled = ranks.run(blocks)
    assert sampled == drawn
    for name in blocks:
        assert (name, ended(found[name])) == (name, ended(expected[name]))
        assert (name, plain(found[name].saves)) == (name, plain(expected[name].saves))
    assert not len(ranks.second.hosts)
    assert not ranks.second.failed


def test_steps_with_and_without_blocks(ranks: HostedRanks) -> None:
    """A request may rest for a step, and others have none; a message comes only for steps with blocks."""
    ranks.open("rests", EACH + "model.logits[:, 7] = 1e3\n")
    for tokens in ({"rests": 2, "plain": 2}, {"plain": 1}, {"rests": 1}, {"plain": 1, "rests": 1}):
        one, other = ranks.step(tokens, 1)
        assert one == other
        assert {name: token for name, token in zip(tokens, one, strict=True) if token == 7}.keys() == (
            {"rests"} & tokens.keys()
        )
    ranks.both(lambda model: model.finish("rests", 3))
    ranks.first.wait("rests")


def test_all_ranks_run_a_step_by_the_same_graph_whose_only_host_has_died(
    ranks: HostedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs of several kinds may have their own memory for what ranks exchange."""
    took_part: list[tuple[str, bool]] = []

    def noting(name: str, begin: Any) -> Any:
        def noted(*given: Any, **more: Any) -> bool:
            found: bool = begin(*given, **more)
            took_part.append((name, found))
            return found

        return noted

    monkeypatch.setattr(ranks.first.hosts, "begin", noting("first", ranks.first.hosts.begin))
    monkeypatch.setattr(ranks.second.hosts, "begin_for", noting("second", ranks.second.hosts.begin_for))
    ranks.open("dies.alone", EACH + "model.logits[:] *= 2.0\n    import os\n    os._exit(1)\n")
    for index in range(3):
        ranks.step({"dies.alone": 1, "plain": 1}, index)
    ranks.both(lambda model: model.finish("dies.alone", 3))
    ranks.first.wait("dies.alone")
    ranks.step({"plain": 1}, 4)
    assert sorted(took_part) == [("first", False), *[("first", True)] * 3, ("second", False), *[("second", True)] * 3]


def test_a_host_that_dies_ends_its_trace_and_changes_nothing_on_either_rank(ranks: HostedRanks) -> None:
    loops = (
        EACH + "model.model.layers[0].output[0][:] *= 2.0\n    if step == 1:\n        import os\n        os._exit(1)\n"
    )
    found, drawn = ranks.run({"dies": loops, "goes.on": EACH + "x = model.logits.sum().save()\n"})
    assert found["dies"].finish is not None
    assert found["dies"].finish.error is not None
    assert found["dies"].finish.error.type == "BlockHostLost"
    goes_on = found["goes.on"].finish
    assert goes_on is not None
    assert goes_on.error is None
    _, alone = ranks.run({"twice": EACH + "model.model.layers[0].output[0][:] *= 2.0\n", "plain": "1\n"})
    plain_run = ranks.run({"none": "1\n", "plain": "1\n"})[1]
    # The first step has its edit on both ranks, and the steps from its end on have none.
    assert drawn[0][0] == alone[0][0]
    assert [tokens[0] for tokens in drawn[1:]] == [tokens[0] for tokens in plain_run[1:]]


def test_a_host_that_is_too_slow_is_ended_on_both_ranks() -> None:
    both = HostedRanks(step_s=1.0)
    try:
        found, _ = both.run({"slow": EACH + "model.logits[:] += sum(range(10**10))\n"}, steps=2)
        assert found["slow"].finish is not None
        assert found["slow"].finish.error is not None
        assert found["slow"].finish.error.type == "BlockTimeout"
    finally:
        both.close()


def test_a_sharded_module_that_a_block_calls_runs_on_both_ranks() -> None:
    both = HostedRanks()
    meeting, entered = threading.Barrier(2), [0, 0]
    for rank, model in enumerate((both.first, both.second)):
        norm: Any = model.module.model.norm
        norm.tp_size, plainly = 2, norm.forward

        def forward(x: torch.Tensor, rank: int = rank, plainly: Any = plainly) -> torch.Tensor:
            entered[rank] += 1
            meeting.wait(10)
            result: torch.Tensor = plainly(x)
            return result

        norm.forward = forward
    try:
        calls = "k = [].save()\n" + EACH + "k.append(model.model.norm(model.model.layers[1].output[0]).clone())\n"
        blocks = {"calls": calls, "wrongly": EACH + "model.model.norm(model.logits)\n"}
        alone = HostedModel()
        expected = alone.run(blocks, steps=3)
        alone.close()
        found, _ = both.run(blocks, steps=3)
        assert plain(found["calls"].saves) == plain(expected["calls"].saves)
        wrongly = found["wrongly"].finish
        assert wrongly is not None
        assert wrongly.error is not None
        assert wrongly.error.line == 2
        assert entered[0] == entered[1] >= 4
    finally:
        both.close()


def test_rows_that_cannot_be_put_in_here_are_told_to_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = linked()
    model = FollowingModel(second)
    model.open("request", "1\n")
    watch = StepWatch(waits={"model.model.layers.0.output": 0})
    first.tell(StepBegan(watch))
    copies = CopiedRows()
    shapes = [copies.add(torch.ones(2, 4)) for _ in range(2)]
    reply = Reply(replaced=Shared([1, [0, 0], [0, 1]], shapes))
    edit = Edit(["request-00000000"], StepSpans([(0, 2)], [0], 2, 1), reply)
    first.tell(Served([edit], StepWatch()), copies.bytes())

    def clone(self: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        model.hosts.begin_for({}, {"request-00000000": 2}, ["request-00000000"])
        value = (torch.zeros(2, 4), torch.zeros(2, 4))
        patch.setattr(torch.Tensor, "clone", clone)
        left = model.hosts.reach("model.model.layers.0.output", value)
    assert left is value
    ((request, failure),) = model.failed
    assert (request, failure.type) == ("request-00000000", "OutOfMemoryError")
    for link in (first, second):
        link.close()
