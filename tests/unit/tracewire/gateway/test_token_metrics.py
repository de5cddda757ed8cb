"""The metrics of tokens: the same text as prometheus_client's own metrics have."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from tracewire.gateway.token_metrics import TokenMetrics

_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


def _lines(registry: CollectorRegistry) -> set[str]:
    """The samples of a registry, but for the times at which prometheus_client's own began."""
    lines = generate_latest(registry).decode().splitlines()
    return {line for line in lines if not line.startswith("#") and "_created" not in line}


def test_the_samples_are_those_of_prometheus_own_metrics() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    metrics = TokenMetrics()
    ours.register(metrics)
    names = {"labelnames": ("model",), "registry": theirs}
    between = Histogram("tracewire_gateway_inter_token_seconds", "x", buckets=_BOUNDS, **names)
    lag = Histogram("tracewire_gateway_output_lag_seconds", "x", buckets=_BOUNDS, **names)
    tokens = Counter("tracewire_gateway_tokens", "x", **names)
    delta_bytes = Counter("tracewire_gateway_delta_bytes", "x", **names)
    for model in ("tiny", 'a "model"\n'):
        counted = metrics.of(model)
        assert metrics.of(model) is counted
        # Also on a bound, below all and above all.
        for seconds in (0.0, 0.001, 0.0011, 0.3, 1, 2.5, 7.0):
            counted.between.observe(seconds)
            between.labels(model).observe(seconds)
        counted.lag.observe(0.02)
        lag.labels(model).observe(0.02)
        counted.tokens += 7
        tokens.labels(model).inc(7)
        counted.delta_bytes += 9
        delta_bytes.labels(model).inc(9)
    assert _lines(ours) == _lines(theirs)
    assert len(_lines(ours)) == 2 * (2 * 14 + 2)
