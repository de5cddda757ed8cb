"""One line for each event and value that the command line prints."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tracewire.cli.format import (
    age,
    counted,
    event_line,
    failure_text,
    lifecycle_line,
    printable,
    short_value,
    timestamp,
)
from tracewire.traces.output import Steered
from tracewire_bus.store.lifecycle import Lifecycle
from tracewire_bus.wire.messages import Change, Failure, FirstToken


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.123456, "0.1235"),
        (7, "7"),
        ("a", "'a'"),
        (np.zeros((2, 3), np.float16), "float16[2, 3]"),
        (np.array([0.5, 123.456, -2], np.float32), "[0.5, 123.5, -2]"),
        (np.array([1.5, 3], ml_dtypes.bfloat16), "[1.5, 3]"),
        (np.zeros(9, np.float32), "float32[9]"),
        (list(range(9)), "[0, 1, 2, 3, 4, 5, 6, 7, ...]"),
        ({"a": 1.0}, "{a: 1}"),
        ("x" * 80, "'" + "x" * 56 + "..."),
    ],
)
def test_a_value_is_short(value: Any, shown: str) -> None:
    assert short_value(value) == shown


def test_things_are_counted() -> None:
    assert [counted(number, "engine") for number in (0, 1, 2)] == ["0 engines", "1 engine", "2 engines"]


def test_an_age_is_in_its_greatest_unit() -> None:
    seconds = (-1, 0.9, 59, 60, 3599, 3600, 86399, 86400, 1e7)
    assert [age(one) for one in seconds] == ["0 s", "0 s", "59 s", "1 min", "59 min", "1 h", "23 h", "1 d", "115 d"]


def test_a_change_says_by_whom_and_from_which_token_on() -> None:
    change = Change(version=1, by="ada", time=0, values={"alpha": 8.0})
    steered = Steered(attempt=1, seq=1, version=1, changes=[change], first=[FirstToken(0, 0, 4)])
    assert event_line(steered) == "steered by ada from token 4 on (version 1): alpha=8"
    steered = Steered(attempt=1, seq=1, version=1, changes=[change], first=[FirstToken(0, 0, 4), FirstToken(1, 0, 7)])
    assert event_line(steered).startswith("steered by ada from token 4 of 0.0, token 7 of 1.0 on (version 1)")
    assert event_line(Steered(attempt=1, seq=1, version=1, changes=[change])).startswith(
        "steered by ada from no token yet on"
    )


def test_a_failure_names_the_user_s_line() -> None:
    assert failure_text(None) == ""
    failure = Failure(type="ValueError", message="no", filename="mine.py", line=7, source="    x = y.z")
    assert failure_text(failure) == "ValueError: no, at mine.py:7: x = y.z"


def test_a_time_is_in_utc_to_the_millisecond() -> None:
    assert timestamp(1_000_000_000.25) == "2001-09-09T01:46:40.250Z"


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({"type": "queued", "client": "one"}, "by one"),
        ({"type": "accepted", "engine": "e", "attempt": 2}, "by e, attempt 2"),
        ({"type": "final", "status": "failed", "error": "ValueError", "tokens": 3}, "failed, ValueError, 3 tokens"),
        ({"type": "paused"}, ""),
    ],
)
def test_what_becomes_of_a_trace_has_its_columns(fields: dict[str, Any], more: str) -> None:
    columns = lifecycle_line(Lifecycle(trace_id="t", model="tiny", **fields)).split("\t")
    assert columns == ["1970-01-01T00:00:00.000Z", fields["type"], "t", "tiny", *([more] if more else [])]


def test_control_characters_are_pictures() -> None:
    assert printable("a\x1b[1m\n\tb\x00\x7f\x9b\r") == "a␛[1m\n\tb␀␡␛␍"
