"""An interval that is read and set again stays the same."""

from __future__ import annotations

import sys

import pytest

from tracewire_engine.worker.switch_interval import set_switch_interval


@pytest.mark.parametrize("microseconds", [1, 49, 50, 57, 999, 5000, 250_000])
def test_an_interval_that_was_read_is_set_as_it_was(microseconds: int) -> None:
    before = sys.getswitchinterval()
    try:
        set_switch_interval(microseconds * 1e-6)
        was = sys.getswitchinterval()
        assert round(was * 1e6) == microseconds
        for _ in range(3):
            set_switch_interval(sys.getswitchinterval())
        assert sys.getswitchinterval() == was
    finally:
        set_switch_interval(before)
