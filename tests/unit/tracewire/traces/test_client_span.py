"""A client's spans: below the caller's current span, around a trace, and none where no code has a span."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, Tracer

import tracewire
from tests.support.bus_engine import BusEngine, Stage, tiny
from tests.support.spans import of_this_process, span_id
from tracewire import Client, TraceCancelled, TraceRejected, UnknownModel
from tracewire_bus.wire.messages import Failure

Engine = Callable[..., Any]


@pytest.fixture
def ended() -> InMemorySpanExporter:
    """The spans that this process has ended."""
    return of_this_process()[1]


@pytest.fixture
def tracer(ended: InMemorySpanExporter) -> Tracer:
    return of_this_process()[0].get_tracer("the caller's")


def only(ended: InMemorySpanExporter, name: str = "text_completion tiny") -> ReadableSpan:
    (found,) = (span for span in ended.get_finished_spans() if span.name == name)
    return found


def parent_of(submission: Any) -> str:
    return submission.context["traceparent"].split("-")[2]


async def test_a_trace_has_a_span_and_sends_its_context(
    client: Client, engine: Engine, tracer: Tracer, ended: InMemorySpanExporter
) -> None:
    async with engine() as running:
        with tracer.start_as_current_span("mine") as mine:
            await client.trace("tiny", "x", max_tokens=3, temperature=0.5).result()
    span = only(ended)
    assert span.parent is not None
    assert span.parent.span_id == mine.get_span_context().span_id
    assert (span.kind, span.status.status_code) == (SpanKind.CLIENT, StatusCode.UNSET)
    (sent,) = running.taken
    assert parent_of(sent) == span_id(span)
    assert span.attributes is not None
    attributes = dict(span.attributes)
    assert 0 < attributes.pop("gen_ai.response.time_to_first_chunk") < 60  # type: ignore[operator]
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "tracewire",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "tracewire.attempt": 1,
        "tracewire.client": "one",
        "tracewire.engine": running.info.engine,
        "tracewire.prompts": 1,
        "tracewire.status": "finished",
        "tracewire.trace_id": sent.trace,
    }


async def test_without_a_current_span_nothing_is_sent(
    client: Client, engine: Engine, ended: InMemorySpanExporter
) -> None:
    async with engine() as running:
        await client.trace("tiny", "x").result()
    assert running.taken[0].context == {}
    assert ended.get_finished_spans() == ()


async def test_a_span_that_is_not_sampled_is_passed_on_as_such(
    client: Client, engine: Engine, ended: InMemorySpanExporter
) -> None:
    from opentelemetry.trace import NonRecordingSpan, SpanContext, use_span

    async with engine() as running:
        with use_span(NonRecordingSpan(SpanContext(1, 2, is_remote=True))):
            await client.trace("tiny", "x").result()
    assert running.taken[0].context["traceparent"].startswith(f"00-{1:032x}-")
    assert running.taken[0].context["traceparent"].endswith("-00")
    assert ended.get_finished_spans() == ()


async def test_another_attempt_is_an_event(
    client: Client, engine: Engine, tracer: Tracer, ended: InMemorySpanExporter
) -> None:
    async def twice(stage: Stage) -> None:
        await stage.accept()
        await stage.restart("its engine was lost")
        await tiny(stage)

    async with engine(twice):
        with tracer.start_as_current_span("mine"):
            await client.trace("tiny", "x").result()
    assert [event.name for event in only(ended).events] == ["tracewire.restarted"]
    assert only(ended).attributes["tracewire.attempt"] == 2  # type: ignore[index]


async def test_a_refused_trace_is_an_error(
    client: Client, engine: Engine, tracer: Tracer, ended: InMemorySpanExporter
) -> None:
    async def refuse(stage: Stage) -> None:
        await stage.final("rejected", Failure(type="TraceRejected", message="no", field="prompt"))

    async with engine(refuse):
        with tracer.start_as_current_span("mine"), pytest.raises(TraceRejected):
            await client.trace("tiny", "x").result()
    span = only(ended)
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "no")
    assert span.attributes is not None
    assert (span.attributes["tracewire.status"], span.attributes["error.type"]) == ("rejected", "TraceRejected")


async def test_a_cancelled_trace_is_none(
    client: Client, engine: Engine, tracer: Tracer, ended: InMemorySpanExporter
) -> None:
    async def wait(stage: Stage) -> None:
        await stage.accept()
        await anyio.sleep_forever()

    async with engine(wait):
        with tracer.start_as_current_span("mine"):
            async with client.trace("tiny", "x") as trace:
                await trace.accepted()
                await trace.cancel("enough")
                with pytest.raises(TraceCancelled):
                    await trace.result()
    span = only(ended)
    assert span.status.status_code == StatusCode.UNSET
    assert span.attributes["tracewire.status"] == "cancelled"  # type: ignore[index]


async def test_a_submission_that_fails_is_an_error(client: Client, tracer: Tracer, ended: InMemorySpanExporter) -> None:
    with tracer.start_as_current_span("mine"), pytest.raises(UnknownModel):
        await client.trace("nothing", "x").start()
    span = only(ended, "text_completion nothing")
    assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.ERROR, "UnknownModel")  # type: ignore[index]


@pytest.mark.parametrize("how", ["left", "forgotten"])
async def test_a_trace_whose_end_is_not_read_has_a_span_too(
    how: str, client: Client, engine: Engine, tracer: Tracer, ended: InMemorySpanExporter
) -> None:
    async with engine():
        with tracer.start_as_current_span("mine"):
            trace = client.trace("tiny", "x", detach=True)
            await trace.start()
        assert [span.name for span in ended.get_finished_spans()] == ["mine"]
        if how == "left":
            await trace.aclose()
        else:
            del trace
        assert only(ended).attributes["gen_ai.request.model"] == "tiny"  # type: ignore[index]


async def test_a_trace_that_is_written_inline_has_the_span_of_its_with(
    client: Client, engine: Engine, tracer: Tracer, ended: InMemorySpanExporter
) -> None:
    async with engine() as running:
        model = await client.models.get("tiny")
        with tracer.start_as_current_span("mine") as mine, model.trace("x") as trace:
            model.model.layers[0].output.save()
        await trace.until_done()
    assert only(ended).parent.span_id == mine.get_span_context().span_id  # type: ignore[union-attr]
    assert parent_of(running.taken[0]) == span_id(only(ended))


async def test_a_blocking_client_takes_the_span_of_the_calling_thread(
    embedded: str, prefix: str, engine: Engine, tracer: Tracer, ended: InMemorySpanExporter
) -> None:
    def call() -> None:
        with tracewire.blocking.Client(embedded, prefix=prefix) as client, tracer.start_as_current_span("mine"):
            client.trace("tiny", "x").result()

    running: BusEngine
    async with engine() as running:
        await anyio.to_thread.run_sync(call)
    assert only(ended).parent.span_id == int(span_id(only(ended, "mine")), 16)  # type: ignore[union-attr]
    assert parent_of(running.taken[0]) == span_id(only(ended))


async def test_a_client_needs_no_opentelemetry(embedded: str, prefix: str, engine: Engine) -> None:
    code = f"""if True:
        import sys
        sys.modules["opentelemetry"] = None  # as where it is not installed
        import tracewire
        with tracewire.blocking.Client({embedded!r}, prefix={prefix!r}) as client:
            print(client.trace("tiny", "x").result().text)
    """
    async with engine() as running:
        done = await anyio.run_process([sys.executable, "-c", code])
    assert (done.stdout, running.taken[0].context) == (b"one two three\n", {})
