"""OpenTelemetry for tests: a collector that takes OTLP over HTTP, and this process's spans in memory."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import set_tracer_provider

__all__ = ["Collector", "Received", "Stuck", "collector", "in_memory", "of_this_process", "span_id"]


@dataclass(frozen=True)
class Received:
    """A span as it came over the wire. Ids are in hexadecimal, the parent's is empty for a root; times in ns."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    begin: int
    end: int
    status: int
    service: str
    attributes: dict[str, Any]
    events: list[str]


@dataclass
class Collector:
    """An OTLP receiver on loopback, and the spans that it has."""

    url: str = ""
    spans: list[Received] = field(default_factory=list)

    def named(self, name: str) -> Received:
        """The only span of this name."""
        (found,) = (one for one in self.spans if one.name == name)
        return found

    def below(self, parent: Received) -> list[str]:
        """The names of a span's children, by the time of their begin."""
        return [one.name for one in sorted(self.spans, key=lambda one: one.begin) if one.parent == parent.id]


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector, until the context is left."""
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.spans += _decoded(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _decoded(request: ExportTraceServiceRequest) -> Iterator[Received]:
    for resource in request.resource_spans:
        service = _values(resource.resource.attributes)["service.name"]
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            yield Received(
                span.name,
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                span.kind,
                span.start_time_unix_nano,
                span.end_time_unix_nano,
                span.status.code,
                service,
                _values(span.attributes),
                [event.name for event in span.events],
            )


def _values(attributes: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        which = value.WhichOneof("value")
        return [plain(one) for one in value.array_value.values] if which == "array_value" else getattr(value, which)

    return {one.key: plain(one.value) for one in attributes}


def in_memory() -> tuple[TracerProvider, InMemorySpanExporter]:
    """A provider, and the spans that it has ended."""
    provider, exporter = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider, exporter


@functools.cache
def _global() -> tuple[TracerProvider, InMemorySpanExporter]:
    provider, exporter = in_memory()
    set_tracer_provider(provider)
    return provider, exporter


def of_this_process() -> tuple[TracerProvider, InMemorySpanExporter]:
    """The provider that this process's clients and gateways take, and the spans that it ends from now on."""
    provider, exporter = _global()
    exporter.clear()
    return provider, exporter


def span_id(span: ReadableSpan) -> str:
    """A span's id in hexadecimal."""
    return f"{span.get_span_context().span_id:016x}"


class Stuck(SpanExporter):
    """An exporter whose collector does not answer until `released`."""

    def __init__(self) -> None:
        self.asked, self.released = threading.Event(), threading.Event()

    def export(self, spans: object) -> SpanExportResult:
        self.asked.set()
        self.released.wait()
        return SpanExportResult.FAILURE
