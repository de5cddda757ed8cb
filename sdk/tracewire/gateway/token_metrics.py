"""The metrics that every token changes, as plain numbers, which Prometheus's collector reads when it is scraped.

A `Histogram` of `prometheus_client` takes a lock for each observation, and so much time as the rest of a token's event.
All requests of one gateway run on one thread, and so does the scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

__all__ = ["Observed", "TokenMetrics", "TokensOf"]

_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_PREFIX = "tracewire_gateway_"


class Observed:
    """A histogram of durations in seconds."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        #: How many were at most each bound, and above the one before; and how many were above all.
        self.counts = [0] * (len(_BOUNDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(_BOUNDS, seconds)] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """For each bound, how many were at most that."""
        bounds = [*map(floatToGoString, _BOUNDS), "+Inf"]
        return list(zip(bounds, accumulate(self.counts), strict=True))


class TokensOf:
    """The tokens of one model.

    Attributes:
        tokens: how many were sampled.
        delta_bytes: the bytes of the encoded deltas in their outputs.
        between: seconds between two outputs of a choice, over the number of the later one's tokens.
        lag: seconds from the engine's step to the gateway's reading of its output.
    """

    __slots__ = ("between", "delta_bytes", "lag", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.delta_bytes = 0
        self.between = Observed()
        self.lag = Observed()


class TokenMetrics(Collector):
    """The metrics of tokens by model."""

    def __init__(self) -> None:
        self._models: dict[str, TokensOf] = {}

    def of(self, model: str) -> TokensOf:
        """Those of one model."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = TokensOf()
        return found

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        between = _histogram(
            "inter_token_seconds", "Seconds between two outputs of a choice, over the number of the later one's tokens."
        )
        lag = _histogram("output_lag_seconds", "Seconds from the engine's step to the gateway's reading of its output.")
        tokens = _counter("tokens", "Sampled tokens under /v1.")
        nbytes = _counter("delta_bytes", "Bytes of encoded deltas in the outputs under /v1.")
        for model, found in self._models.items():
            between.add_metric([model], found.between.buckets(), found.between.total)
            lag.add_metric([model], found.lag.buckets(), found.lag.total)
            tokens.add_metric([model], found.tokens)
            nbytes.add_metric([model], found.delta_bytes)
        yield from (between, lag, tokens, nbytes)


_LABELS: Sequence[str] = ("model",)


def _histogram(name: str, documentation: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(_PREFIX + name, documentation, labels=_LABELS)


def _counter(name: str, documentation: str) -> CounterMetricFamily:
    return CounterMetricFamily(_PREFIX + name, documentation, labels=_LABELS)
