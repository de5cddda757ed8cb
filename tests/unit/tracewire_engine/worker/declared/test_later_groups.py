"""Conditions, controllers, features, lenses and subspaces: a plan does for all requests what each of them means."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.declared_plans import HIDDEN, Graphs
from tests.support.later_plans import autoencoder, play, vector
from tests.support.rank_threads import on_ranks
from tracewire_bus.wire.messages import Features, Hold, Probe, SteerFeatures
from tracewire_engine.worker.declared import device_autoencoder
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
    monkeypatch.setattr(device_autoencoder, "_PIECE", 5 * 4 * HIDDEN)
    declared = DeclaredRequests(torch.device("cpu"))
    declared.recorders[False] = Graphs()  # type: ignore[assignment]
    store = declared.decoded.vectors.autoencoders
    store.bound, store.host_bound = 0, 1 << 30
    play(seed, declared, steps=45)
    assert all(one.offloaded for one in store._recent.values())
    assert seed or store._recent


def split(rank: int, ranks: int, add: Any) -> DeclaredRequests:
    """Declared interventions of a rank, which splits all autoencoders with others; with what stands for a recorder."""
    declared = DeclaredRequests(torch.device("cpu"))
    declared.recorders[False] = Graphs()  # type: ignore[assignment]
    declared.shards = rank, add
    store = declared.decoded.vectors.autoencoders
    store.rank, store.ranks, store.split_above = rank, ranks, 0
    return declared


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_autoencoders_that_ranks_split_do_the_same(seed: int, ranks: int) -> None:
    """Also where plans are recorded: no recording has an exchange in it, which the ranks could not agree on."""

    def on(rank: int, add: Any) -> int:
        declared = split(rank, ranks, add)
        play(seed, declared, steps=45)
        known = declared.decoded.vectors.autoencoders._recent
        assert all(one.ranks == ranks for one in known.values())
        return len(known)

    found = on_ranks(ranks, on)
    assert len(set(found)) == 1
    assert seed or found[0]


LATER = {
    "chosen": (Features("f", "", autoencoder("relu"), indices=[1, 23]), True),
    "greatest": (Features("f", "", autoencoder("relu"), top_k=3, threshold=0.1), False),
    "chosen of a topk": (Features("f", "", autoencoder("topk"), indices=[1]), False),
    "steered": (SteerFeatures("", autoencoder("gated"), [1, 23], scale=0.5), True),
}


@pytest.mark.parametrize("name", LATER)
def test_no_recording_has_what_a_step_copies_from_the_host(name: str) -> None:
    one, recorded = LATER[name]
    declared = DeclaredRequests(torch.device("cpu"))
    graphs = Graphs()
    declared.recorders[False] = graphs  # type: ignore[assignment]
    store = declared.decoded.vectors.autoencoders
    store.bound, store.host_bound = 0, 1 << 30
    kept = play(7, declared, steps=45, arrivals=0.02, make=lambda rng: [(one, [1])])
    assert bool(graphs.made) == recorded
    # The plan lasts nevertheless.
    assert kept > 20


@pytest.mark.parametrize("name", LATER)
def test_no_recording_has_what_ranks_exchange(name: str) -> None:
    one, recorded = LATER[name]

    def on(rank: int, add: Any) -> tuple[int, int]:
        added: list[None] = []

        def counted(mine: torch.Tensor) -> torch.Tensor:
            added.append(None)
            return add(mine)  # type: ignore[no-any-return]

        declared = split(rank, 2, counted)
        play(7, declared, steps=45, arrivals=0.02, make=lambda rng: [(one, [1])])
        return len(declared.recorders[False].made), len(added)  # type: ignore[attr-defined]

    (made, exchanged), other = on_ranks(2, on)
    assert (made, exchanged) == other
    assert bool(made) == recorded
    # The rows of chosen features are exchanged once.
    assert exchanged == 1 if recorded else exchanged > 20


def test_requests_that_read_in_two_ways_are_apart() -> None:
    """As many features chosen as are read elsewhere."""
    sae, declared = autoencoder("relu"), DeclaredRequests(torch.device("cpu"))
    reads = [Features("f", "", sae, top_k=3, threshold=0.1), Features("f", "", sae, indices=[1, 5, 9])]
    play(7, declared, steps=45, make=lambda rng: [(rng.choice(reads), [1])])


def test_ranks_that_do_not_agree_end_the_requests_and_exchange_nothing() -> None:
    added: list[torch.Tensor] = []
    declared = split(0, 2, added.append)
    declared.agree = lambda what, members: False  # type: ignore[method-assign]
    one = Features("f", "", autoencoder("relu"), top_k=3, threshold=0.1)
    with pytest.raises(AssertionError):
        play(7, declared, steps=3, make=lambda rng: [(one, [1])])
    assert [live.failure and live.failure.type for live in declared.live.values()] == ["RanksDiffer"]
    assert not added


@pytest.mark.parametrize("seed", range(4))
def test_recorded_kernels_do_the_same(seed: int) -> None:
    declared = DeclaredRequests(torch.device("cpu"))
    graphs = Graphs()
    declared.recorders[False] = graphs  # type: ignore[assignment]
    play(100 + seed, declared, steps=45, arrivals=0.02)
    assert any(graph.replays for graph in graphs.made)


@pytest.mark.parametrize("read", ["top", "chosen", "hold"])
def test_the_only_read_of_a_recorded_plan(read: str) -> None:
    declared = DeclaredRequests(torch.device("cpu"))
    declared.recorders[False] = Graphs()  # type: ignore[assignment]
    sae = autoencoder("jumprelu")
    made = {
        "top": [(Features("f", "", sae, top_k=3, threshold=0.1), [1])],
        "chosen": [(Features("f", "", sae, indices=[3, 5]), [1])],
        "hold": [(Probe("score", "", vector(1)), [1]), (Hold("s", "", vector(1), "score", 0.5, -2.0, 2.0), [1])],
    }
    play(7, declared, steps=45, arrivals=0.02, make=lambda rng: made[read])
