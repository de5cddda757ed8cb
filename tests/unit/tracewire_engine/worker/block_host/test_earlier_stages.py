"""The last stage takes what the earlier ones say stage by stage, whatever order it comes in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from nnsight.intervention.envoy import Envoy

from tests.support.hosted_model import Model
from tests.support.hosted_ranks import linked
from tracewire_bus.wire.messages import Block
from tracewire_engine.protocol.keys import BLOCK_ARG
from tracewire_engine.worker.block_host.accounts import Accounts
from tracewire_engine.worker.block_host.earlier_stages import EarlierStages
from tracewire_engine.worker.block_host.forwarded_blocks import ForwardedBlocks
from tracewire_engine.worker.block_host.reading import ModelPaths
from tracewire_engine.worker.block_host.setup import outline_of
from tracewire_engine.worker.blocks.live_params import LiveRun


def three() -> list[Any]:
    """Three stages."""
    module = Model(3)
    paths = ModelPaths(outline_of(module), "model.layers")

    def end(group: Any, address: str) -> Any:
        if group.rank_in_group == 2:
            return EarlierStages(group, address)
        return ForwardedBlocks(Envoy(module), Accounts(paths), group, address)

    return linked(end, 3)


def opened(ends: list[Any], source: str) -> None:
    block = Block(name="block", source=source, filename="a", first_line=1)
    arguments = {BLOCK_ARG: msgspec.msgpack.encode(block)}
    for end in ends[:2]:
        end.open("a", SimpleNamespace(engine_id="a", index=0), arguments, ("a", 1, ""), [], LiveRun(""))
    ends[2].open("a", ends[0]._accounts.of(arguments))


def test_the_parts_of_later_stages_and_steps_wait_for_their_turn() -> None:
    first, second, last = ends = three()
    opened(
        ends,
        "seen = [].save()\nfor step in tracer.iter[:]:\n"
        "    seen.append(model.model.layers[0].input.sum() + model.model.layers[1].output[0].sum())\n",
    )
    for stage, layer in ((second, 1), (first, 0)):
        for step in range(2):
            assert stage.begin_for({}, {"other": 1, "a": 2}, ["other", "a"])
            stage.reach(f"model.model.layers.{layer}.input", ((torch.full((3, 4), 10 * layer + step),), {}))
            stage.reach(f"model.model.layers.{layer}.output", (torch.full((3, 4), 10.0 * layer + step), None))
            stage.end()
    for step in range(2):
        last.begin({"other": 1, "a": 2}, ["other", "a"])
        assert last.due
        one, end_of_one, two, end_of_two = last.take()
        assert not last.due
        assert (one.location, one.passed) == ("model.model.layers.0.input", [])
        # The rows of the request with a block.
        assert one.value[0][0][1:].tolist() == [[step] * 4] * 2
        assert (end_of_one.location, end_of_one.passed) == ("", ["model.model.layers.0.output"])
        assert (two.location, two.passed) == ("model.model.layers.1.output", ["model.model.layers.1.input"])
        assert two.value[0][1:].tolist() == [[10.0 + step] * 4] * 2
        assert (end_of_two.location, end_of_two.passed) == ("", [])


def test_a_step_without_blocks_has_no_message() -> None:
    first, second, last = ends = three()
    opened(ends, "x = model.logits.sum().save()\n")
    for stage in (first, second):
        assert not stage.begin_for({}, {"other": 1}, ["other"])
        stage.end()
    last.begin({"other": 1}, ["other"])
    assert not last.due
    last.discard("a")
    last.begin({"a": 1}, ["a"])
    assert not last.due


def test_only_the_first_stage_begins_a_step() -> None:
    first, _, last = ends = three()
    opened(ends, "model.logits[:] = 0\n")
    first._send(
        msgspec.msgpack.encode(["part", 0, [], [], b"", {}]), SimpleNamespace(bytes=bytes, late=False), later=True
    )
    with pytest.raises(RuntimeError, match="where the beginning of a step was expected"):
        last.began()
