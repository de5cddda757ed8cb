"""Conditions, controllers, features, lenses and subspaces: a plan does for all requests what each of them means."""

from __future__ import annotations

import pytest
import torch

from tests.support.declared_plans import HIDDEN, Graphs
from tests.support.later_plans import autoencoder, play, vector
from tracewire_bus.wire.messages import Features, Hold, Probe
from tracewire_engine.worker.declared import autoencoder_store
from tracewire_engine.worker.declared.plan import DeclaredRequests


@pytest.mark.parametrize("seed", range(16))
def test_a_plan_is_what_its_interventions_mean_row_by_row(seed: int) -> None:
    declared = DeclaredRequests(torch.device("cpu"))
    play(seed, declared)
    # Nothing is left of requests that are over.
    for name in list(declared.live):
        declared.pop(name)
    assert len(declared.signals._free) == len(declared.signals.values)


@pytest.mark.parametrize("seed", range(8))
def test_autoencoders_in_the_hosts_memory_do_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where plans are recorded: no recording has a copy from the host in it."""
    monkeypatch.setattr(autoencoder_store, "_PIECE", 5 * 4 * HIDDEN)
    declared = DeclaredRequests(torch.device("cpu"))
    declared.recorder = Graphs()  # type: ignore[assignment]
    store = declared.decoded.vectors.autoencoders
    store.bound, store.host_bound = 0, 1 << 30
    play(seed, declared, steps=45)
    assert all(one.offloaded for one in store._recent.values())
    assert seed or store._recent


def test_what_streams_an_encoder_is_planned_anew_in_each_step() -> None:
    relu, recordings = autoencoder("relu"), []
    for one in (
        Features("f", "", relu, indices=[1, 3]),
        Features("f", "", relu, top_k=3, threshold=0.1),
        Features("f", "", autoencoder("topk"), indices=[1]),
    ):
        declared = DeclaredRequests(torch.device("cpu"))
        graphs = Graphs()
        declared.recorder = graphs  # type: ignore[assignment]
        store = declared.decoded.vectors.autoencoders
        store.bound, store.host_bound = 0, 1 << 30
        play(7, declared, steps=45, arrivals=0.02, make=lambda rng, one=one: [(one, [1])])
        recordings.append(bool(graphs.made))
    assert recordings == [True, False, False]


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
