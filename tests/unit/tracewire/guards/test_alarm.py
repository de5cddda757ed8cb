"""What counts as a decision."""

from __future__ import annotations

from typing import Any

import pytest

from tracewire.guards.alarm import Alarm, Decision, decision_of
from tracewire.guards.rules import Rule

RULE = Rule(name="r", save="s", above=1.0, ask="terminal", live={"alpha": 0.0})


@pytest.mark.parametrize(
    ("answer", "decision"),
    [
        ("Cancel ", Decision("cancel")),
        ("steer", Decision("steer", {"alpha": 0.0})),
        ({"do": "steer", "live": {"alpha": 2.0}}, Decision("steer", {"alpha": 2.0})),
        ({"do": "resume", "reason": "fine"}, Decision("resume", {}, "fine")),
        (Decision("resume"), Decision("resume")),
    ],
)
def test_answers_that_are_decisions(answer: Any, decision: Decision) -> None:
    assert decision_of(answer, RULE) == decision


@pytest.mark.parametrize("answer", ["maybe", {"do": "stop"}, {"live": {}}, 5, None, True])
def test_answers_that_are_none(answer: Any) -> None:
    with pytest.raises(ValueError, match="expected a decision"):
        decision_of(answer, RULE)


def test_steering_needs_values() -> None:
    with pytest.raises(ValueError, match="live parameters that 'steer' sets"):
        decision_of("steer", Rule(name="r", save="s", above=1.0, ask="terminal"))


def test_an_alarm_has_a_name_within_its_trace() -> None:
    alarm = Alarm(trace_id="t", model="m", rule="r", save="s", invoke=1, choice=2, attempt=3, token=4)
    assert alarm.mark == "r/3/1.2/4"
