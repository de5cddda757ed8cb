"""Locations of declared interventions are reached by forward hooks where no block runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tracewire_bus.domain.intervention_checks import normalize
from tracewire_bus.wire.messages import Probe, Steer
from tracewire_engine.protocol.messages import Placed
from tracewire_engine.worker.blocks.live_params import LiveRun
from tracewire_engine.worker.declared.hooks import DeclaredInterleaver
from tracewire_engine.worker.declared.ops import Declaration
from tracewire_engine.worker.declared.plan import DeclaredRequests

AT = "model.layers.0.output"


class Doubling:
    """In place of a location's hook: doubles what it is served."""

    location = AT

    def __init__(self) -> None:
        self.served: list[list[float]] = []

    def run(self, value: Any) -> None:
        self.served.append(value.tolist())
        value.mul_(2)


@pytest.fixture
def armed() -> SimpleNamespace:
    """A model whose first layer is armed, with one declared location, while a step runs and no block does."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
    interleaver = object.__new__(DeclaredInterleaver)
    DeclaredInterleaver.__init__(interleaver)
    declared = DeclaredRequests(torch.device("cpu"))
    DeclaredInterleaver.install(interleaver, declared, model)
    doubling = Doubling()
    declared.hooks = {AT: doubling}  # type: ignore[dict-item]
    for _ in range(2):
        interleaver.arm([AT])
    interleaver.interleaving = True
    return SimpleNamespace(model=model, interleaver=interleaver, doubling=doubling, declared=declared)


def test_an_armed_location_is_served_once_a_visit(armed: SimpleNamespace) -> None:
    assert armed.model.layers[0](torch.ones(2)).tolist() == [2.0, 2.0]
    assert armed.model.layers[1](torch.ones(2)).tolist() == [1.0, 1.0]
    assert armed.doubling.served == [[1.0, 1.0]]


def test_it_is_not_served_outside_of_a_step_nor_where_another_stage_serves_it(armed: SimpleNamespace) -> None:
    armed.interleaver.interleaving = False
    armed.model.layers[0](torch.ones(2))
    armed.interleaver.interleaving = True
    armed.interleaver.elsewhere = frozenset((AT,))
    armed.model.layers[0](torch.ones(2))
    assert armed.doubling.served == []


def test_a_location_without_interventions_is_left_alone(armed: SimpleNamespace) -> None:
    armed.declared.hooks = {}
    assert armed.model.layers[0](torch.ones(2)).tolist() == [1.0, 1.0]


class Layer(torch.nn.Module):
    """Calls a module that several layers share."""

    def __init__(self, shared: torch.nn.Module, number: float) -> None:
        super().__init__()
        self.shared, self.number = shared, number

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        called: torch.Tensor = self.shared(torch.full_like(value, self.number))
        return called


@pytest.mark.parametrize("way", ["hooks", "interleaver", "replay"])
def test_a_module_that_is_called_several_times_is_served_at_the_first_call(way: str) -> None:
    """Its path has the number of the first layer that has it."""
    shared, model = torch.nn.Identity(), torch.nn.Module()
    model.layers = torch.nn.ModuleList(Layer(shared, number) for number in (1.0, 2.0, 3.0))
    location = "model.layers.0.shared.output"
    interleaver = object.__new__(DeclaredInterleaver)
    DeclaredInterleaver.__init__(interleaver)
    declared = DeclaredRequests(torch.device("cpu"))
    DeclaredInterleaver.install(interleaver, declared, model)
    interleaver.interleaving = True
    ones = normalize([Steer("layers.0.shared", np.ones(4), scale=100.0), Probe("p", "layers.0.shared")])
    encoded = msgspec.msgpack.encode([Placed(one, [(location, False)]) for one in ones])
    declared.add("a", Declaration("a", 0, encoded, LiveRun(""), declared.decoded))
    for step in range(3):
        state = SimpleNamespace(num_computed_tokens=3 + step, num_prompt_tokens=3)
        declared.begin(["a"], {"a": 1}, 1, {"a": state})
        if way == "hooks":
            interleaver.arm(declared.hooks)
        else:
            given = interleaver.handle if way == "interleaver" else interleaver.replay
            shared.forward = lambda value, given=given: (given(location, value), value)[1]  # type: ignore[method-assign]
        found = [layer(torch.zeros(1, 4))[0, 0].item() for layer in model.layers]
        assert found == [101.0, 2.0, 3.0]
        assert declared.plan is not None
        (collector,) = declared.plan.collectors
        assert collector.found[0] is not None
        assert collector.found[0].tolist() == [[101.0] * 4]
        collector.reset()
