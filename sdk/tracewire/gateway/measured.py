"""Measures the outputs of one trace as the gateway reads them."""

from __future__ import annotations

from time import monotonic, time
from typing import Final

from tracewire import Item, Lagging, Output, Restarted, Steered

from .keys import Caller
from .limits import Limits
from .metrics import Metrics

__all__ = ["Measured", "SteerTimes"]

#: How many changes are remembered whose event has not come.
_STEERS_KEPT: Final = 4096


class SteerTimes:
    """When this gateway took the latest changes of live parameters, on the monotonic clock."""

    def __init__(self) -> None:
        self._begun: dict[tuple[str, int], float] = {}

    def begin(self, trace_id: str, version: int, begun: float) -> None:
        """Note when the request for a version of a trace's live parameters came."""
        while len(self._begun) >= _STEERS_KEPT:
            # Nobody reads its trace here.
            del self._begun[next(iter(self._begun))]
        self._begun[trace_id, version] = begun

    def end(self, trace_id: str, version: int) -> float | None:
        """How long ago the request for this version came, in seconds; None if it did not come to this gateway."""
        begun = self._begun.pop((trace_id, version), None)
        return None if begun is None else monotonic() - begun


class Measured:
    """The events of one trace, counted for the metrics and for the key's limit.

    `begun` is when its request came, on the monotonic clock, and `steers` has the changes by this gateway.
    """

    # whole: what a request knows of its trace
    def __init__(
        self,
        metrics: Metrics,
        limits: Limits,
        caller: Caller,
        model: str,
        begun: float,
        *,
        trace_id: str,
        steers: SteerTimes,
    ) -> None:
        self._metrics = metrics
        self._model = model
        self._trace_id = trace_id
        self._steers = steers
        self._limits = limits
        self._caller = caller
        self._begun = begun
        self._first = metrics.first_output_seconds.labels(model)
        self._tokens = metrics.by_token.of(model)
        self._last: dict[tuple[int, int], float] = {}

    def item(self, item: Item) -> None:
        """Count an event."""
        if not isinstance(item, Output):
            self._other(item)
            return
        now, count, counted = monotonic(), len(item.token_ids), self._tokens
        where = item.invoke, item.choice
        last = self._last.get(where)
        if not self._last:
            self._first.observe(now - self._begun)
        if last is not None and count:
            counted.between.observe((now - last) / count)
        self._last[where] = now
        if item.time:
            counted.lag.observe(max(0.0, time() - item.time))
        counted.tokens += count
        counted.delta_bytes += len(memoryview(item.encoded_deltas))
        self._limits.sampled(self._caller, count)

    def _other(self, item: Item) -> None:
        match item:
            case Steered():
                if (seconds := self._steers.end(self._trace_id, item.version)) is not None:
                    self._metrics.steer_seconds.labels(self._model).observe(seconds)
            case Restarted():
                self._metrics.restarts.labels(self._model).inc()
            case Lagging() if item.action != "caught_up":
                self._metrics.lags.labels(self._model, item.action).inc()
