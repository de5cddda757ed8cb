"""The OpenTelemetry span of each HTTP request that a gateway serves, below the span that the request names.

Imported with `--tracing` only, which needs the extra `tracing`.
"""

from __future__ import annotations

from typing import Any

from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    format_span_id,
    format_trace_id,
    get_tracer,
    use_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tracewire_bus.log_fields import add_log_fields

from .guard import OPEN

__all__ = ["ServerSpans"]

#: Requests of probes and scrapes, which have no span.
_UNTRACED = OPEN | {"/metrics"}
_context = TraceContextTextMapPropagator()


class ServerSpans:
    """An ASGI app that makes a span of each HTTP request to `app`, until the end of the answer, streams included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._tracer = get_tracer("tracewire")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["path"] in _UNTRACED:
            await self._app(scope, receive, send)
            return
        span = self._tracer.start_span(
            scope["method"], _parent(scope), kind=SpanKind.SERVER, attributes=_request_attributes(scope)
        )
        known = span.get_span_context()
        add_log_fields(otel_trace_id=format_trace_id(known.trace_id), otel_span_id=format_span_id(known.span_id))

        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                _note_answer(span, message)
            await send(message)

        with use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                await self._app(scope, receive, observed)
            except Exception as error:
                span.set_attribute("error.type", type(error).__name__)
                span.set_status(Status(StatusCode.ERROR))
                raise
            finally:
                # The router has found the route by now. A path would be a name for each trace.
                if (route := getattr(scope.get("route"), "path", None)) is not None:
                    span.update_name(f"{scope['method']} {route}")
                    span.set_attribute("http.route", route)


def _parent(scope: Scope) -> Any:
    """The context that the request's headers name. Malformed headers name none."""
    carrier: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        if name in (b"traceparent", b"tracestate"):
            carrier.setdefault(name.decode(), []).append(value.decode("latin-1"))
    if len(carrier.get("traceparent", ())) > 1:
        return None
    return _context.extract(carrier)


def _request_attributes(scope: Scope) -> dict[str, Any]:
    found: dict[str, Any] = {
        "http.request.method": scope["method"],
        "url.scheme": scope["scheme"],
        "url.path": scope["path"],
        "network.protocol.version": scope["http_version"],
    }
    if scope.get("client") is not None:
        found["client.address"] = scope["client"][0]
    if scope.get("server") is not None:
        found["server.address"], found["server.port"] = scope["server"][:2]
    return found


def _note_answer(span: Span, message: Message) -> None:
    status = message["status"]
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_attribute("error.type", str(status))
        span.set_status(Status(StatusCode.ERROR))
    for name, value in message.get("headers", ()):
        if name.lower() == b"tracewire-trace-id":
            span.set_attribute("tracewire.trace_id", value.decode("latin-1"))
