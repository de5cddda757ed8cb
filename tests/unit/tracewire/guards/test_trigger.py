"""Thresholds with hysteresis, over a number of tokens in a row."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tracewire.guards.rules import Rule
from tracewire.guards.trigger import Trigger


def alarms(values: list[float], **rule: Any) -> list[int]:
    trigger = Trigger(Rule(name="r", save="s", do="resume", **rule))
    return [index for index, value in enumerate(values) if trigger.feed(value)]


@pytest.mark.parametrize(
    ("values", "rule", "expected"),
    [
        ([0, 2, 2, 0, 2], {"above": 1}, [1, 4]),
        ([0, -2, -2, 0, -2], {"below": -1}, [1, 4]),
        # On the threshold is not beyond it.
        ([1, 1], {"above": 1}, []),
        ([2, 2, 0, 2, 2, 2, 2], {"above": 1, "tokens": 3}, [5]),
        # It sleeps until a value has come back to the release.
        ([2, 0.9, 2, 0.5, 2], {"above": 1, "release": 0.5}, [0, 4]),
        ([-2, -0.9, -2, -0.5, -2], {"below": -1, "release": -0.5}, [0, 4]),
        ([0, math.nan, math.nan, 0, math.nan], {"above": 1}, [1, 4]),
        ([0, math.nan, 0, math.nan], {"below": -1, "tokens": 1}, [1, 3]),
        ([math.inf], {"above": 1}, [0]),
    ],
)
def test_an_alarm_goes_off_once_for_each_crossing(values: list[float], rule: dict[str, Any], expected: Any) -> None:
    assert alarms(values, **rule) == expected
