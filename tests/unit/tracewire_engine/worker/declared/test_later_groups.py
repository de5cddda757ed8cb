"""Conditions, controllers, features, lenses and subspaces: a plan does for all requests what each of them means."""

from __future__ import annotations

import pytest
import torch

from tests.support.declared_plans import Graphs
from tests.support.later_plans import play
from tracewire_engine.worker.declared.plan import DeclaredRequests


@pytest.mark.parametrize("seed", range(16))
def test_a_plan_is_what_its_interventions_mean_row_by_row(seed: int) -> None:
    declared = DeclaredRequests(torch.device("cpu"))
    play(seed, declared)
    # Nothing is left of requests that are over.
    for name in list(declared.live):
        declared.pop(name)
    assert len(declared.signals._free) == len(declared.signals.values)


@pytest.mark.parametrize("seed", range(4))
def test_recorded_kernels_do_the_same(seed: int) -> None:
    declared = DeclaredRequests(torch.device("cpu"))
    graphs = Graphs()
    declared.recorder = graphs  # type: ignore[assignment]
    play(100 + seed, declared, steps=45, arrivals=0.02)
    assert any(graph.replays for graph in graphs.made)
