"""Limits by key."""

from __future__ import annotations

import pytest

from tracewire.gateway.keys import Caller
from tracewire.gateway.limits import Limits
from tracewire.gateway.problems import Problem


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_so_many_requests_of_a_key_run_at_once() -> None:
    limits = Limits(concurrency=1)
    two, usual, other = Caller("two", concurrency=2), Caller("usual"), Caller("other")
    with limits.request(two), limits.request(two), limits.request(usual), limits.request(other):
        for caller in (two, usual):
            with pytest.raises(Problem, match="running") as caught, limits.request(caller):
                pass
            assert (caught.value.status, caught.value.code) == (429, "rate_limited")
            assert caught.value.retry_after
    with limits.request(usual):
        pass


def test_a_request_that_fails_is_over() -> None:
    limits = Limits(concurrency=1)
    with pytest.raises(ZeroDivisionError), limits.request(Caller("a")):
        raise ZeroDivisionError
    with limits.request(Caller("a")):
        pass


def test_requests_a_minute() -> None:
    clock = Clock()
    limits, caller = Limits(clock=clock), Caller("a", requests_per_minute=2)
    for _ in range(2):
        with limits.request(caller):
            pass
    with pytest.raises(Problem) as caught, limits.request(caller):
        pass
    assert caught.value.retry_after == pytest.approx(30)
    clock.now = 30
    with limits.request(caller):
        pass
    with pytest.raises(Problem), limits.request(caller):
        pass
    # A file that was read again may have other limits.
    with limits.request(Caller("a", requests_per_minute=3)):
        pass


def test_tokens_a_minute_are_counted_when_they_have_come() -> None:
    clock = Clock()
    limits, caller = Limits(clock=clock), Caller("a", tokens_per_minute=60)
    with limits.request(caller):
        limits.sampled(caller, 100)
    with pytest.raises(Problem, match="60 tokens") as caught, limits.request(caller):
        pass
    assert caught.value.retry_after == pytest.approx(41)
    clock.now = 41
    with limits.request(caller):
        limits.sampled(Caller("b"), 1000)
