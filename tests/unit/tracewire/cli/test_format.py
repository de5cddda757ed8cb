"""One line for each event and value that the command line prints."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tracewire.cli.format import counted, lifecycle_line, printable, short_value, timestamp
from tracewire_bus.store.lifecycle import Lifecycle


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
