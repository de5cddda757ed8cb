"""Spans reach a collector as the environment says, and one that is away delays nobody."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased

from tests.support.spans import Collector, Stuck, collector
from tracewire_bus import span_export
from tracewire_bus.span_export import exporting, otlp_exporter


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collector() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        yield found


def export_one(service: str = "a-service") -> None:
    with exporting(otlp_exporter(), service, "host:1", "1.2") as provider:
        provider.get_tracer("test").start_span("one").end()


def test_a_span_that_has_ended_is_at_the_collector_when_the_context_is_left(collected: Collector) -> None:
    export_one()
    assert collected.named("one").service == "a-service"


def test_the_environment_names_the_service(collected: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    export_one()
    assert collected.named("one").service == "mine"


def test_the_environment_names_the_sampler(collected: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    with exporting(otlp_exporter(), "s", "i", "v") as provider:
        assert isinstance(provider.sampler, ParentBased)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    export_one()
    assert collected.spans == []


def test_variables_that_do_not_go_together_are_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1000000")
    with pytest.raises(ValueError, match="max_export_batch_size"):
        otlp_exporter()


def test_a_collector_that_does_not_answer_holds_up_neither_spans_nor_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each step here would wait for ever if it waited for the collector."""
    monkeypatch.setattr(span_export, "FLUSH_S", 0.01)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    stuck = Stuck()
    try:
        with exporting(stuck, "s", "i", "v") as provider:
            tracer = provider.get_tracer("test")
            for _ in range(4):
                tracer.start_span("first").end()
            assert stuck.asked.wait(60)
            for _ in range(1000):
                tracer.start_span("more").end()
            (processor,) = provider._active_span_processor._span_processors
            assert isinstance(processor, BatchSpanProcessor)
            assert len(processor._batch_processor._queue) == 16
    finally:
        stuck.released.set()
    assert "did not take the last spans" in caplog.text


def test_a_collector_that_is_away_costs_spans_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(span_export, "FLUSH_S", 0.2)
    with caplog.at_level(logging.WARNING):
        export_one()
    assert any(record.name.startswith("opentelemetry") for record in caplog.records)
