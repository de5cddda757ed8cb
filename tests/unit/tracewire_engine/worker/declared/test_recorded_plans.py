"""Plans whose kernels are recorded come to what a loop over requests gives."""

from __future__ import annotations

import pytest
import torch

from tests.support.declared_plans import (
    Graphs,
    play,
)
from tracewire_engine.worker.declared import plan as declared_module
from tracewire_engine.worker.declared.plan import DeclaredRequests


def test_recorded_plans_are_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared_module, "RECORD_AFTER", 1)
    graphs = Graphs()
    for seed in range(8):
        declared = DeclaredRequests(torch.device("cpu"))
        declared.recorders[False] = graphs
        play(seed, declared)
    assert len(graphs.made) > 10
    assert sum(graph.replays for graph in graphs.made) > 20
