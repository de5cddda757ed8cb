"""Locations of declared interventions are reached by forward hooks where no block runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tracewire_engine.worker.declared.hooks import DeclaredInterleaver
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
