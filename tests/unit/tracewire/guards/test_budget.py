"""The actions of a guard are counted by the minute and by the trace."""

from __future__ import annotations

from tracewire.guards.budget import Actions
from tracewire.guards.rules import Budget


def test_a_minute_slides() -> None:
    actions = Actions(Budget(actions_per_minute=2))
    assert [actions.take("t", now) for now in (0, 30, 59.9)] == ["", "", "actions_per_minute"]
    # The first action is a minute ago; what was forbidden does not count.
    assert [actions.take("t", now) for now in (60, 61, 90)] == ["", "actions_per_minute", ""]


def test_each_trace_has_its_own() -> None:
    actions = Actions(Budget(actions_per_trace=1))
    assert [actions.take(trace, 0) for trace in ("a", "b", "a")] == ["", "", "actions_per_trace"]
    actions.forget("a")
    assert actions.take("a", 0) == ""


def test_no_limit_is_none() -> None:
    actions = Actions(Budget())
    assert {actions.take("t", 0) for _ in range(1000)} == {""}
