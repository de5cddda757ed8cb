"""The spans of a gateway's requests: below the caller's, above the trace's, and named for routes."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.support.gateways import Served
from tests.support.spans import of_this_process, span_id
from tests.support.until import until
from tracewire import BusUnavailable
from tracewire_bus.json_logs import JsonFormatter

Engine = Callable[..., Any]
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=x"}


@pytest.fixture
def ended() -> InMemorySpanExporter:
    """The spans that this process has ended."""
    return of_this_process()[1]


@pytest.fixture
async def traced(gateway: Callable[..., Any], ended: InMemorySpanExporter) -> AsyncIterator[Served]:
    """A gateway with spans."""
    async with gateway(tracing=True) as served:
        yield served


async def request_span(ended: InMemorySpanExporter) -> ReadableSpan:
    """The span of the only request, once it has ended."""

    def found() -> list[ReadableSpan]:
        return [span for span in ended.get_finished_spans() if span.kind == SpanKind.SERVER]

    await until(lambda: bool(found()))
    (span,) = found()
    return span


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_below_its_caller_and_above_its_trace(
    stream: bool, traced: Served, engine: Engine, ended: InMemorySpanExporter
) -> None:
    async with engine() as running, traced.openai() as api:
        create: Any = api.completions.create
        answer = await create(model="tiny", prompt="x", max_tokens=3, stream=stream, extra_headers=HEADERS)
        if stream:
            assert "".join([chunk.choices[0].text async for chunk in answer if chunk.choices]) == "one two three"
        span = await request_span(ended)
    (client_span,) = (one for one in ended.get_finished_spans() if one.kind == SpanKind.CLIENT)
    assert span.name == "POST /v1/completions"
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT  # type: ignore[union-attr]
    assert client_span.parent.span_id == span.context.span_id  # type: ignore[union-attr]
    (sent,) = running.taken
    assert sent.context == {"traceparent": f"00-{TRACE}-{span_id(client_span)}-01", "tracestate": "vendor=x"}
    assert dict(span.attributes or {}) == {
        "client.address": "127.0.0.1",
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/v1/completions",
        "network.protocol.version": "1.1",
        "server.address": "127.0.0.1",
        "server.port": httpx.URL(traced.url).port,
        "tracewire.trace_id": sent.trace,
        "url.path": "/v1/completions",
        "url.scheme": "http",
    }
    assert span.status.status_code == StatusCode.UNSET
    # The stream belongs to the request.
    assert client_span.end_time <= span.end_time  # type: ignore[operator]


async def test_a_submitted_trace_has_the_span_of_its_request(
    traced: Served, engine: Engine, ended: InMemorySpanExporter
) -> None:
    async with engine() as running, traced.http() as http:
        answer = await http.post("/traces", json={"model": "tiny", "prompt": "x"}, headers=HEADERS)
        assert answer.status_code == 202
        span = await request_span(ended)
        await until(lambda: bool(running.taken))
    (client_span,) = (one for one in ended.get_finished_spans() if one.kind == SpanKind.CLIENT)
    assert client_span.parent.span_id == span.context.span_id  # type: ignore[union-attr]
    assert running.taken[0].context["traceparent"] == f"00-{TRACE}-{span_id(client_span)}-01"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("traceparent", "nonsense")],
        [("traceparent", HEADERS["traceparent"]), ("traceparent", HEADERS["traceparent"])],
    ],
)
async def test_without_a_caller_s_span_a_request_is_a_root(
    headers: list[tuple[str, str]], traced: Served, ended: InMemorySpanExporter
) -> None:
    async with traced.http() as http:
        await http.get("/engines", headers=headers)
    span = await request_span(ended)
    assert (span.name, span.parent) == ("GET /engines", None)


async def test_probes_have_no_span(traced: Served, ended: InMemorySpanExporter) -> None:
    async with traced.http() as http:
        for path in ("/healthz", "/readyz", "/metrics", "/engines"):
            await http.get(path)
    assert (await request_span(ended)).name == "GET /engines"


async def test_a_path_without_a_route_names_no_span(traced: Served, ended: InMemorySpanExporter) -> None:
    async with traced.http() as http:
        await http.get("/secret/path")
    span = await request_span(ended)
    assert span.name == "GET"
    assert span.status.status_code == StatusCode.UNSET


async def test_a_defect_is_an_error(
    traced: Served, ended: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(traced.gateway.client.engines, "list", broken)
    with caplog.at_level(logging.CRITICAL):
        async with traced.http() as http:
            await http.get("/engines")
    span = await request_span(ended)
    assert span.status.status_code == StatusCode.ERROR
    assert span.attributes["error.type"] == "ZeroDivisionError"  # type: ignore[index]


async def test_an_answer_that_is_the_service_s_fault_is_an_error(
    traced: Served, ended: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any, **__: Any) -> Any:
        raise BusUnavailable("Redis is away")

    monkeypatch.setattr(traced.gateway.client.engines, "list", away)
    async with traced.http() as http:
        assert (await http.get("/engines")).status_code == 503
    span = await request_span(ended)
    assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.ERROR, "503")  # type: ignore[index]


async def test_a_refused_request_has_a_span_with_its_status(
    traced: Served, engine: Engine, ended: InMemorySpanExporter
) -> None:
    async with engine(), traced.openai() as api:
        with pytest.raises(openai.NotFoundError):
            await api.completions.create(model="nothing", prompt="x")
    span = await request_span(ended)
    assert span.attributes["http.response.status_code"] == 404  # type: ignore[index]


async def test_a_gateway_without_tracing_makes_none(
    served: Served, engine: Engine, ended: InMemorySpanExporter
) -> None:
    async with engine() as running, served.http() as http:
        body = {"model": "tiny", "prompt": "x"}
        assert (await http.post("/v1/completions", json=body, headers=HEADERS)).status_code == 200
    assert running.taken[0].context == {}
    assert ended.get_finished_spans() == ()


async def test_what_is_logged_about_a_request_has_the_ids_of_its_span(
    traced: Served, ended: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[dict[str, Any]] = []

    async def logging_list(*_: Any, **__: Any) -> list[Any]:
        record = logging.LogRecord("tracewire", logging.INFO, __file__, 1, "asked", None, None)
        lines.append(json.loads(JsonFormatter().format(record)))
        return []

    monkeypatch.setattr(traced.gateway.client.engines, "list", logging_list)
    async with traced.http() as http:
        await http.get("/engines", headers=HEADERS)
    assert lines[0]["otel_trace_id"] == TRACE
    assert lines[0]["otel_span_id"] == span_id(await request_span(ended))
