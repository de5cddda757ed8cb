"""A trace's blocks fed by events, without a process: what a session answers."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
import torch
from nnsight.tracing.tracer import inc

from tests.support.hosted_model import Model, settings_of
from tracewire_bus.wire.messages import Block
from tracewire_engine.block_host.session import Session
from tracewire_engine.block_host.stand_ins import tree_of
from tracewire_engine.protocol.block_host import Arrived, Began, Finished, Wait
from tracewire_engine.protocol.keys import BLOCK_ARG
from tracewire_engine.protocol.messages import Report
from tracewire_engine.worker.blocks import save_marks

ID = "r-00000000"


class Collected:
    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.finishes: list[Any] = []

    def send(self, *reports: Report) -> None:
        for report in reports:
            self.steps += report.steps
            self.finishes += report.finishes


@pytest.fixture(autouse=True)
def _marks() -> None:
    inc()
    save_marks.install()


def session() -> tuple[Session, Collected]:
    def refuse(*_: Any) -> Any:
        raise AttributeError

    settings, link = settings_of(Model(2)), Collected()
    return Session(tree_of(settings.modules, refuse), settings, refuse, link, None), link


def arrived(source: str) -> Arrived:
    return Arrived(ID, {BLOCK_ARG: msgspec.msgpack.encode(Block(name="b", source=source))})


def test_waits_are_for_the_visit_that_a_block_asks_for() -> None:
    one, _ = session()
    one.begin(Began([arrived("for step in tracer.iter[2:]:\n    model.model.layers[1].output")], [(ID, 2, 0)]))
    assert one.waits() == [Wait("model.model.layers.1.output", 2)]
    names = ["model.model.layers.1.output"]
    one.count(array("H", [0]), names)
    assert one.waits() == [Wait("model.model.layers.1.output", 1)]
    one.begin(Began([], [(ID, 1, 1)]))
    one.count(array("H", [0]), names)
    one.begin(Began([], [(ID, 1, 2)]))
    assert one.waits() == [Wait("model.model.layers.1.output", 0)]
    assert not one.begins()


def test_a_block_that_reads_live_values_waits_for_the_next_step() -> None:
    one, _ = session()
    source = "for step in tracer.iter[:]:\n    x = live.nothing if step > 5 else 1\n"
    one.begin(Began([arrived(source)], [(ID, 1, 0)]))
    assert one.begins()
    assert one.waits() == []


def test_caches_are_observed_and_skipped_modules_waited_for() -> None:
    one, _ = session()
    source = (
        "cache = tracer.cache(modules=[model.model.layers[0]]).save()\n"
        "model.model.layers[1].skip((model.model.layers[1].input, 1))"
    )
    one.begin(Began([arrived(source)], [(ID, 1, 0)]))
    assert one.observed() == ["model.model.layers.0.output"]
    value = ((torch.ones(1, 4),), {})
    one.reach("model.model.layers.1.input", value, by_request=False)
    assert one.waits() == [Wait("model.model.layers.1.skip", 0)]


def test_steps_and_ends_are_reported() -> None:
    one, link = session()
    one.begin(Began([arrived("x = model.model.layers[0].output[0].sum().save()")], [(ID, 2, 0)]))
    with torch.inference_mode():
        one.reach("model.model.layers.0.output", (torch.ones(2, 4), torch.ones(2, 4)), by_request=False)
    one.end()
    assert [(step.request, step.index, step.ended) for step in link.steps] == [("r", 0, "")]
    one.finish(Finished(ID, 1))
    (finish,) = link.finishes
    assert (finish.error, finish.steps, [entry.name for entry in finish.manifest]) == (None, 1, ["x"])
    assert one.idle()
