"""Running traces are compared with the limits on their saves and pauses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tracewire_bus.domain.limit_table import LimitCounts, Limits
from tracewire_engine.adapter.claims import Claims
from tracewire_engine.adapter.trace_limits import TraceLimits


def _run(trace: str, saved: int = 0, *, paused_since: float | None = None) -> Any:
    return SimpleNamespace(trace=trace, saved_bytes=saved, pause=SimpleNamespace(paused_since=paused_since))


@pytest.fixture
def ended() -> list[tuple[str, str]]:
    """The ids of the traces that were ended, and the fields of their failures."""
    return []


def _limits(limits: Limits, runs: list[Any], ended: list[tuple[str, str]], counts: LimitCounts) -> TraceLimits:
    claims = cast("Claims", SimpleNamespace(running=lambda: iter(runs)))

    def end(run: Any, status: str, failure: Any) -> bool:
        assert (status, failure.type) == ("failed", "LimitExceeded")
        ended.append((run.trace, failure.field))
        return True

    return TraceLimits(claims, limits, counts, end)


def test_a_run_that_saves_more_than_it_may_is_ended(ended: list[tuple[str, str]]) -> None:
    counts = LimitCounts()
    _limits(Limits(trace_save_bytes=10), [_run("at", 10), _run("beyond", 11)], ended, counts).check(0.0)
    assert ended == [("beyond", "saves")]
    assert counts == {"trace_save_bytes": 1}


def test_a_pause_counts_from_its_own_beginning(ended: list[tuple[str, str]]) -> None:
    run = _run("t", paused_since=0.0)
    checked = _limits(Limits(paused_s=10), [run], ended, LimitCounts())
    checked.check(0.0)
    checked.check(10.0)
    assert not ended
    # Another pause, which began after the run had gone on.
    run.pause.paused_since = 11.0
    checked.check(11.0)
    checked.check(20.0)
    assert not ended
    checked.check(21.5)
    assert ended == [("t", "pause")]


def test_limits_of_zero_are_none(ended: list[tuple[str, str]]) -> None:
    runs = [_run("t", 10**15, paused_since=0.0)]
    checked = _limits(Limits(paused_s=0, trace_save_bytes=0), runs, ended, LimitCounts())
    checked.check(0.0)
    checked.check(1e9)
    assert not ended
