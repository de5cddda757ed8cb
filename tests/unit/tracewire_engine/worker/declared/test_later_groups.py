"""Conditions, controllers, features, lenses and subspaces: a plan does for all requests what each of them means."""

from __future__ import annotations

import pytest
import torch

from tests.support.declared_plans import Graphs
from tests.support.later_plans import autoencoder, play, vector
from tracewire_bus.wire.messages import Features, Hold, Probe
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


@pytest.mark.parametrize("read", ["top", "chosen", "hold"])
def test_the_only_read_of_a_recorded_plan(read: str) -> None:
    declared = DeclaredRequests(torch.device("cpu"))
    declared.recorder = Graphs()  # type: ignore[assignment]
    sae = autoencoder("jumprelu")
    made = {
        "top": [(Features("f", "", sae, top_k=3, threshold=0.1), [1])],
        "chosen": [(Features("f", "", sae, indices=[3, 5]), [1])],
        "hold": [(Probe("score", "", vector(1)), [1]), (Hold("s", "", vector(1), "score", 0.5, -2.0, 2.0), [1])],
    }
    play(7, declared, steps=45, arrivals=0.02, make=lambda rng: made[read])
