"""Exporting OpenTelemetry spans over OTLP, as the standard environment variables say.

Imports OpenTelemetry's SDK, which the extra `tracing` installs. Spans wait in a bounded queue of the process, and a
thread sends them in batches. A collector that does not answer costs spans and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

__all__ = ["FLUSH_S", "SCOPE", "exporting", "otlp_exporter"]

logger = logging.getLogger("tracewire")

#: The name of Tracewire's instrumentation scope.
SCOPE: Final = "tracewire"
#: How long an ending process waits for the collector to take the last spans, in seconds.
FLUSH_S: Final = 2.0


def otlp_exporter() -> SpanExporter:
    """An exporter to the collector that the environment names, by default http://localhost:4318.

    Raises:
        ValueError: an environment variable is malformed.
    """
    # This one sends nothing. It reads the variables of the queue now, and not only when the model has loaded.
    BatchSpanProcessor(ConsoleSpanExporter()).shutdown()  # type: ignore[no-untyped-call]
    return OTLPSpanExporter()


@contextmanager
def exporting(exporter: SpanExporter, service: str, instance: str, version: str) -> Iterator[TracerProvider]:
    """Export the spans of the provider that the context yields, until the context is left.

    Args:
        exporter: sends the spans.
        service: name of the service, unless the environment names another.
        instance: the id of this process among those of the service.
        version: the service's version.

    """
    resource = Resource.create({SERVICE_INSTANCE_ID: instance, SERVICE_VERSION: version})
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: service}))
    # Not at the interpreter's exit, which would wait for an absent collector.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield provider
    finally:
        # `shutdown` waits for the collector, for longer than an ending process should.
        ending = Thread(target=provider.shutdown, name="tracewire: export of the last spans", daemon=True)
        ending.start()
        ending.join(FLUSH_S)
        if ending.is_alive():
            logger.warning("the collector did not take the last spans within %g s", FLUSH_S)
