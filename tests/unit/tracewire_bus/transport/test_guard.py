"""The guard names some malformed entries in the log, and counts the rest."""

from __future__ import annotations

import logging

import pytest

from tracewire_bus.transport.guard import LINES, Guard, Malformed


def test_the_log_names_some_and_counts_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard()
    with caplog.at_level(logging.WARNING, "tracewire"):
        for number in range(1000):
            assert guard.read(int, b"\xffx", key="tw:key", entry=f"1-{number}") is None
    assert guard.malformed == 1000
    assert len(caplog.records) == LINES
    assert "'1-0' of 'tw:key'" in caplog.messages[0]
    assert "no more of them are logged for a minute" in caplog.messages[-1]
    with pytest.raises(Malformed, match="'a' of 'tw:record' in Redis is malformed: invalid literal"):
        guard.demand(int, "x", key="tw:record", entry="a")
