"""The table of limits: its options, its counts, and its page."""

from __future__ import annotations

import pytest

from tests.support.limit_page import PAGE, written
from tracewire_bus.domain.limit_table import (
    DEFAULTS,
    LimitCounts,
    LimitExceeded,
    Limits,
    changed,
    documented,
    option_name,
    parse_limits,
)


def test_limits_are_read_by_name() -> None:
    limits = parse_limits(["choices=3", "trace-save-bytes=0"])
    assert limits == Limits(choices=3, trace_save_bytes=0)
    assert changed(limits) == {"choices": 3, "trace_save_bytes": 0}
    assert parse_limits([]) == DEFAULTS


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("choises=3", "did you mean choices"),
        ("choices", "expected NAME=NUMBER"),
        ("choices=0", "at least 1"),
        ("choices=-1", "whole number"),
        ("choices=many", "whole number"),
        ("live=3", "fixed at 64"),
    ],
)
def test_a_wrong_limit_is_named(given: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_limits([given])


def test_an_error_names_the_option_that_sets_its_limit() -> None:
    counts = LimitCounts()
    error = LimitExceeded("sampling.n", "too many", "choices")
    counts.note(error)
    counts.note(LimitExceeded("deadline", "not a limit of the table"))
    counts.note(ValueError("another error"))
    assert str(error) == "too many (--limit choices)"
    assert counts == {"choices": 1}
    assert "--limit" not in str(LimitExceeded("live", "too many", "live"))


def test_each_limit_stands_in_the_documentation() -> None:
    assert PAGE.read_text() == written(PAGE.read_text())
    assert len(documented()) == 2 + len(Limits.__struct_fields__)
    assert option_name("steers_per_s") == "steers-per-s"
