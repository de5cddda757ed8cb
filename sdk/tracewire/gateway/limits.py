"""Limits by key: concurrent requests, requests a minute, tokens a minute. Each gateway counts for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from .keys import Caller
from .problems import Problem

__all__ = ["Limits"]

_MINUTE_S = 60.0
#: `Retry-After` where too many requests run at once.
_BUSY_S = 1.0


class _Bucket:
    """A token bucket that fills with `rate` a minute, up to `rate`."""

    def __init__(self, rate: int, now: float) -> None:
        self.rate = rate
        self._level = float(rate)
        self._time = now

    def wait_s(self, now: float) -> float:
        """The seconds until one can be taken."""
        self._level = min(self.rate, self._level + (now - self._time) * self.rate / _MINUTE_S)
        self._time = now
        return max(0.0, (1 - self._level) * _MINUTE_S / self.rate)

    def take(self, count: int) -> None:
        """Take `count`, more than there are if it must be."""
        self._level -= count


class Limits:
    """The use that each key makes of one gateway. `concurrency` is for keys that name no limit; 0 stands for none."""

    def __init__(self, concurrency: int = 0, clock: Callable[[], float] = monotonic) -> None:
        self._concurrency = concurrency
        self._clock = clock
        self._running: dict[str, int] = {}
        self._buckets: dict[tuple[str, str], _Bucket] = {}

    @contextmanager
    def request(self, caller: Caller) -> Iterator[None]:
        """Count a request for as long as it runs.

        Raises:
            Problem: the key has reached one of its limits.
        """
        most = caller.concurrency or self._concurrency
        running = self._running.get(caller.name, 0)
        if most and running >= most:
            raise _limited(f"the key {caller.name!r} has {running} requests running; its limit is {most}", _BUSY_S)
        self.order(caller)
        self._running[caller.name] = running + 1
        try:
            yield
        finally:
            left = self._running[caller.name] - 1
            if left:
                self._running[caller.name] = left
            else:
                del self._running[caller.name]

    def order(self, caller: Caller) -> None:
        """Count a request, or an order over a WebSocket, against the key's rates.

        Raises:
            Problem: the key has used up one of them.
        """
        for kind, rate in (("tokens", caller.tokens_per_minute), ("requests", caller.requests_per_minute)):
            bucket = self._bucket(caller.name, kind, rate)
            if bucket is not None and (wait := bucket.wait_s(self._clock())) > 0:
                raise _limited(f"the key {caller.name!r} has used its {rate} {kind} a minute", wait)
        if (bucket := self._bucket(caller.name, "requests", caller.requests_per_minute)) is not None:
            bucket.take(1)

    def sampled(self, caller: Caller, tokens: int) -> None:
        """Count sampled tokens against the key's limit."""
        bucket = self._bucket(caller.name, "tokens", caller.tokens_per_minute)
        if bucket is not None:
            bucket.take(tokens)

    def _bucket(self, name: str, kind: str, rate: int) -> _Bucket | None:
        if not rate:
            return None
        bucket = self._buckets.get((name, kind))
        if bucket is None or bucket.rate != rate:
            bucket = self._buckets[name, kind] = _Bucket(rate, self._clock())
        return bucket


def _limited(message: str, retry_after: float) -> Problem:
    return Problem(429, message, code="rate_limited", retry_after=retry_after)
