"""Measures the outputs of one trace as the gateway reads them."""

from __future__ import annotations

from time import monotonic, time

from tracewire import Item, Output

from .keys import Caller
from .limits import Limits
from .metrics import Metrics

__all__ = ["Measured"]


class Measured:
    """The outputs of one trace, counted for the metrics and for the key's limit.

    `begun` is when its request came, on the monotonic clock.
    """

    def __init__(self, metrics: Metrics, limits: Limits, caller: Caller, model: str, begun: float) -> None:
        self._limits = limits
        self._caller = caller
        self._begun = begun
        self._first = metrics.first_output_seconds.labels(model)
        self._between = metrics.inter_token_seconds.labels(model)
        self._lag = metrics.output_lag_seconds.labels(model)
        self._tokens = metrics.tokens.labels(model)
        self._bytes = metrics.delta_bytes.labels(model)
        self._last: dict[tuple[int, int], float] = {}

    def item(self, item: Item) -> None:
        """Count an event."""
        if not isinstance(item, Output):
            return
        now, count = monotonic(), len(item.token_ids)
        where = item.invoke, item.choice
        last = self._last.get(where)
        if not self._last:
            self._first.observe(now - self._begun)
        if last is not None and count:
            self._between.observe((now - last) / count)
        self._last[where] = now
        if item.time:
            self._lag.observe(max(0.0, time() - item.time))
        self._tokens.inc(count)
        self._bytes.inc(len(memoryview(item.encoded_deltas)))
        self._limits.sampled(self._caller, count)
