"""The registry of one gateway's metrics."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tracewire.gateway.metrics import Metrics


def test_each_gateway_counts_for_itself() -> None:
    one, other = Metrics(), Metrics()
    one.by_token.of("tiny").tokens += 3
    assert b'tracewire_gateway_tokens_total{model="tiny"} 3.0' in one.text()
    assert b'model="tiny"' not in other.text()


def test_the_text_is_one_that_prometheus_reads() -> None:
    metrics = Metrics()
    metrics.requests.labels("GET", "/traces", "200").inc()
    metrics.first_output_seconds.labels('a "model"\n').observe(0.2)
    found = {family.name: family for family in text_string_to_metric_families(metrics.text().decode())}
    assert found["tracewire_gateway_requests"].samples[0].value == 1
    labels = {sample.labels.get("model") for sample in found["tracewire_gateway_first_output_seconds"].samples}
    assert labels == {'a "model"\n'}
    assert all(name.startswith("tracewire_") and family.documentation for name, family in found.items())
