"""Waits between attempts double up to a bound, and begin anew after a success."""

from __future__ import annotations

import logging

from tracewire_bus.transport.backoff import Backoff


def test_waits_double_up_to_a_bound_and_are_never_more() -> None:
    backoff = Backoff(first_s=1.0, most_s=6.0)
    for most in (1.0, 2.0, 4.0, 6.0, 6.0):
        assert most / 2 <= backoff.next() <= most


def test_after_a_success_they_begin_anew() -> None:
    backoff = Backoff(first_s=1.0, most_s=64.0)
    for _ in range(5):
        backoff.next()
    backoff.reset()
    assert backoff.next() <= 1.0


def test_any_number_of_failures_can_be_waited_for() -> None:
    backoff = Backoff(first_s=0.05, most_s=2.0)
    for _ in range(5000):
        assert backoff.next() <= 2.0


def test_an_outage_is_told_twice() -> None:
    backoff = Backoff()
    told = []
    for number in range(1, 100):
        backoff.next()
        if backoff.level == logging.WARNING:
            told.append(number)
    assert told == [3, 30]
