"""Live parameters in a worker: a change holds from the step on that begins after it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from tracewire_bus.wire.messages import ScheduledChange
from tracewire_bus.wire.packing import pack
from tracewire_engine.link.step_link import encode_changes
from tracewire_engine.protocol.messages import Changes
from tracewire_engine.protocol.schedule import encode_schedule
from tracewire_engine.worker.blocks.live_params import LiveRun, LiveRuns, LiveValues


def _steer(runs: LiveRuns, changes: dict[str, tuple[int, dict[str, Any]]], *over: str) -> list[str]:
    packed: Changes = {
        name: (version, {live: msgspec.Raw(pack(value)) for live, value in values.items()})
        for name, (version, values) in changes.items()
    }
    return runs.steer(encode_changes(packed, over, 0.0))


def test_a_change_holds_from_the_next_step_on_for_all_requests_of_its_run() -> None:
    runs = LiveRuns()
    one = runs.join("run", pack({"alpha": 0.0, "beta": 1.0}), "r1", "t/0", 0)
    assert runs.join("run", pack({"alpha": 9.0}), "r2", "t/1", 0) is one
    _steer(runs, {"run": (1, {"alpha": 2.0})})
    _steer(runs, {"run": (2, {"beta": 3.0})})
    assert (one.version, one.values) == (0, {"alpha": 0.0, "beta": 1.0})
    assert runs.apply() == [one]
    assert (one.version, one.values) == (2, {"alpha": 2.0, "beta": 3.0})
    assert runs.apply() == []


def test_a_change_that_comes_before_the_first_request_counts() -> None:
    runs = LiveRuns()
    _steer(runs, {"run": (1, {"alpha": 2.0})})
    runs.apply()
    assert runs.join("run", pack({"alpha": 0.0, "beta": 1.0}), "r", "t", 0).values == {"alpha": 2.0, "beta": 1.0}


def test_a_run_is_forgotten_with_its_last_request_or_when_the_adapter_says_so() -> None:
    runs = LiveRuns()
    for name in ("plain", "changed"):
        runs.join(name, pack({"alpha": 0.0}), name, "t", 0)
    _steer(runs, {"changed": (1, {"alpha": 1.0})})
    runs.apply()
    for name in ("plain", "changed"):
        runs.leave(name, name)
    assert list(runs.runs) == ["changed"]
    assert _steer(runs, {}, "changed") == ["changed"]
    assert not runs.runs


def test_a_block_reads_what_was_declared_and_sets_nothing() -> None:
    run = LiveRun("run")
    run.values = {"alpha": 0.5}
    live = LiveValues(run, torch.device("cpu"))
    assert live.alpha == 0.5
    with pytest.raises(AttributeError, match=r"no live parameter 'beta' .*\(declared: alpha\)"):
        _ = live.beta
    with pytest.raises(AttributeError, match="changed by a controller"):
        live.alpha = 1.0


def _schedule(*changes: tuple[int, dict[str, Any]]) -> bytes:
    planned = [ScheduledChange(index=index, values=pack(values)) for index, values in changes]
    encoded = encode_schedule(planned, 0)
    assert encoded is not None
    return encoded


def test_a_scheduled_change_holds_from_its_token_on_for_its_own_request() -> None:
    runs = LiveRuns()
    shared = runs.join("run", pack({"alpha": 0.0, "beta": 0.0}), "r1", "t/0", 0)
    runs.join("run", pack({"alpha": 0.0, "beta": 0.0}), "r2", "t/1", 0)
    own = runs.schedule("run", "r2", _schedule((0, {"alpha": 1.0}), (3, {"alpha": 2.0}), (3, {"alpha": 3.0})))
    assert [own.advance(index) for index in (-4, 0, 2, 3, 4)] == [True, False, False, True, False]
    assert own.values == {"alpha": 3.0, "beta": 0.0}
    # A client's change reaches both, and none is lost to the other's values.
    _steer(runs, {"run": (1, {"beta": 5.0})})
    assert runs.apply() == [shared]
    assert (own.values, shared.values) == ({"alpha": 3.0, "beta": 5.0}, {"alpha": 0.0, "beta": 5.0})
    runs.leave("run", "r2")
    assert not shared.scheduled


def test_a_change_that_was_skipped_over_holds_too() -> None:
    """Tokens are not sampled one by one where a preempted request is computed again."""
    runs = LiveRuns()
    runs.join("run", pack({"alpha": 0.0}), "r", "t", 0)
    own = runs.schedule("run", "r", _schedule((2, {"alpha": 1.0}), (4, {"alpha": 2.0})))
    assert own.advance(9)
    assert own.values == {"alpha": 2.0}
