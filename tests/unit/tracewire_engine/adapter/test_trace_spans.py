"""The spans that an adapter makes of the traces that it takes: what they are below, and what they tell."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import NonRecordingSpan, NoOpTracer, SpanContext, SpanKind, StatusCode, TraceFlags, use_span

from tests.support.scripted_engine import ScriptedEngine, acts, info, serving
from tests.support.served import submission
from tests.support.spans import Stuck, in_memory, span_id
from tests.support.stepping import Gate, free, some, whole
from tests.support.until import until
from tracewire import Client, Final, Prompt, TraceRejected
from tracewire.traces import client_span
from tracewire_bus import recovery, span_export
from tracewire_bus.bus import Bus, Taken
from tracewire_bus.json_logs import JsonFormatter
from tracewire_bus.wire.messages import Block, Invoke, Lagging
from tracewire_engine.adapter.trace_spans import TraceSpans

PATIENCE = 60
#: What the callers of these tests name as their span.
CALLER = SpanContext(trace_id=0xABC, span_id=0xDEF, is_remote=True, trace_flags=TraceFlags(1))


@pytest.fixture
def recorded() -> tuple[TraceSpans, InMemorySpanExporter]:
    """The maker of an adapter's spans, and the spans that have ended."""
    provider, exporter = in_memory()
    return TraceSpans(provider.get_tracer("test")), exporter


@pytest.fixture(autouse=True)
def _clients_make_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever provider other tests have set for this process."""
    monkeypatch.setattr(client_span, "_tracer", NoOpTracer)


Recorded = tuple[TraceSpans, InMemorySpanExporter]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


async def ran(client: Client, exporter: InMemorySpanExporter, *args: Any, **options: Any) -> ReadableSpan:
    """A trace from its submission to its end, below the caller's span: the span of its only attempt."""
    with use_span(NonRecordingSpan(CALLER)):
        await client.trace("tiny", *args, **options).until_done()
    await until(lambda: bool(named(exporter, "text_completion tiny")))
    (span,) = named(exporter, "text_completion tiny")
    return span


async def test_a_trace_has_its_wait_and_its_run_below_the_span_of_the_submission(
    client: Client, bus: Bus, recorded: Recorded
) -> None:
    spans, exporter = recorded
    async with serving(bus, free(), info(engine="the-engine"), spans=spans):
        await client.models.get("tiny", timeout=PATIENCE)
        span = await ran(client, exporter, "hello", acts, max_tokens=5, temperature=0.5, trace_id="mine")
    (queued,) = named(exporter, "queue tiny")
    for one, kind in ((queued, SpanKind.INTERNAL), (span, SpanKind.SERVER)):
        assert one.context.trace_id == CALLER.trace_id
        # The client's own span is the caller's here, because its tracer makes none.
        assert one.parent is not None
        assert one.parent.span_id == CALLER.span_id
        assert one.kind == kind
    assert queued.start_time <= queued.end_time == span.start_time < span.end_time  # type: ignore[operator]
    found = attributes(span)
    assert 0 < found.pop("gen_ai.response.time_to_first_chunk") < PATIENCE
    assert 0 <= found.pop("tracewire.queue_seconds") < PATIENCE
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "tracewire",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 1,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "tracewire.attempt": 1,
        "tracewire.client": "one",
        "tracewire.engine": "the-engine",
        "tracewire.prompts": 1,
        "tracewire.status": "finished",
        "tracewire.trace_id": "mine",
    }
    assert [event.name for event in span.events] == ["tracewire.accepted", "tracewire.first_token"]
    assert attributes(queued) == {"tracewire.trace_id": "mine", "gen_ai.request.model": "tiny"}
    assert len(exporter.get_finished_spans()) == 2


async def test_a_trace_of_a_client_without_spans_has_a_root(client: Client, bus: Bus, recorded: Recorded) -> None:
    spans, exporter = recorded
    async with serving(bus, free(), spans=spans):
        await client.models.get("tiny", timeout=PATIENCE)
        await client.trace("tiny", "hello", acts, max_tokens=5).result()
        await until(lambda: bool(exporter.get_finished_spans()))
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.parent) == ("text_completion tiny", None)
    assert attributes(span)["tracewire.queue_seconds"] >= 0


@pytest.mark.parametrize("context", [{"traceparent": "00-zz"}, {"traceparent": "x" * 10_000}, {"baggage": "a=b"}])
async def test_a_malformed_context_is_none(
    context: dict[str, str], client: Client, bus: Bus, recorded: Recorded
) -> None:
    spans, exporter = recorded
    async with serving(bus, free(), spans=spans):
        await bus.submit(submission("t", context=context, invokes=[Invoke(prompt="x", sampling={"max_tokens": 1})]))
        assert (await client.subscribe("t").result()).token_ids
        await until(lambda: bool(exporter.get_finished_spans()))
    assert exporter.get_finished_spans()[0].parent is None


async def test_steers_and_pauses_are_events(client: Client, bus: Bus, recorded: Recorded) -> None:
    spans, exporter = recorded
    gate = Gate()
    async with serving(bus, ScriptedEngine(gate), spans=spans):
        await client.models.get("tiny", timeout=PATIENCE)
        async with client.trace("tiny", "hello", acts, live={"alpha": 0.0}, max_tokens=200) as trace:
            gate.step(3)
            await some(trace, 3)
            await trace.steer(alpha=1.0)
            # An output, or the change, comes with each step.
            gate.step(1)
            while (await anext(trace)).type != "steered":
                gate.step(1)
            await trace.pause(by="me")
            while (await anext(trace)).type != "paused":
                pass
            await trace.resume()
            while (await anext(trace)).type != "resumed":
                pass
            gate.open()
            await trace.result()
        await until(lambda: bool(exporter.get_finished_spans()))
    (span,) = exporter.get_finished_spans()
    told = {event.name: dict(event.attributes or {}) for event in span.events}
    assert told["tracewire.steered"] == {"version": 1}
    assert told["tracewire.paused"] == {"by": "me"}
    assert told["tracewire.resumed"] == {"by": "one"}


async def test_an_attempt_on_each_engine_has_a_span_below_the_same_one(
    client: Client, bus: Bus, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.1)
    spans, exporter = recorded
    gate = Gate()
    async with serving(bus, dying := ScriptedEngine(gate), info(engine="first"), spans=spans) as first:
        await client.models.get("tiny", timeout=PATIENCE)
        with use_span(NonRecordingSpan(CALLER)):
            trace = client.trace("tiny", "hello", acts, max_tokens=20, detach=True)
            await trace.start()
        gate.step(5)
        await some(trace, 5)
        dying.die()
        await first.ended.wait()
        async with serving(bus, free(), info(engine="second"), spans=spans):
            await whole(client, trace.id, "hello", 20)
            await until(lambda: len(named(exporter, "text_completion tiny")) == 2)
    await trace.aclose()
    lost, good = named(exporter, "text_completion tiny")
    assert [one.parent.span_id for one in (lost, good)] == [CALLER.span_id] * 2  # type: ignore[union-attr]
    assert [attributes(one)["tracewire.engine"] for one in (lost, good)] == ["first", "second"]
    assert [attributes(one)["tracewire.attempt"] for one in (lost, good)] == [1, 2]
    assert (lost.status.status_code, attributes(lost)["error.type"]) == (StatusCode.ERROR, "EngineLost")
    assert "tracewire.status" not in attributes(lost)
    assert (good.status.status_code, attributes(good)["tracewire.status"]) == (StatusCode.UNSET, "finished")
    (restarted,) = (event for event in good.events if event.name == "tracewire.restarted")
    assert "died" in restarted.attributes["reason"]  # type: ignore[index,operator]
    # The second wait begins when nobody looks.
    assert len(named(exporter, "queue tiny")) == 1


async def test_an_engine_that_was_killed_leaves_its_number_free(
    client: Client, bus: Bus, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.0)
    spans, exporter = recorded
    trace = client.trace("tiny", "hello", acts, max_tokens=3, detach=True)
    await bus.submit(trace._submission)
    (taken,) = await bus.queue.take("tiny", "killed", 1, 100)
    await bus.records.open(trace.id, "killed", taken.attempt)
    async with serving(bus, free(), spans=spans):
        await whole(client, trace.id, "hello", 3)
        await until(lambda: bool(exporter.get_finished_spans()))
    (span,) = exporter.get_finished_spans()
    assert attributes(span)["tracewire.attempt"] == 2


@pytest.mark.parametrize(
    ("options", "field"),
    [({"block": "compile"}, "block"), ({"max_tokens": 0}, "sampling.max_tokens")],
    ids=["by the adapter", "by the engine"],
)
async def test_a_refused_trace_is_an_error(
    options: dict[str, Any], field: str, client: Client, bus: Bus, recorded: Recorded
) -> None:
    spans, exporter = recorded
    block = Block(name="b", source="(") if "block" in options else None
    sampling = {"max_tokens": options.get("max_tokens", 1)}
    context = {"traceparent": f"00-{CALLER.trace_id:032x}-{CALLER.span_id:016x}-01"}
    async with serving(bus, free(), spans=spans):
        await bus.submit(submission("t", block=block, context=context, invokes=[Invoke(prompt="x", sampling=sampling)]))
        with pytest.raises(TraceRejected) as refused:
            await client.subscribe("t").result()
        await until(lambda: len(exporter.get_finished_spans()) == 2)
    assert refused.value.field == field
    (span,) = named(exporter, "text_completion tiny")
    assert span.parent is not None
    assert span.parent.span_id == CALLER.span_id
    assert (span.status.status_code, attributes(span)["tracewire.status"]) == (StatusCode.ERROR, "rejected")
    assert attributes(span)["error.type"] in ("SyntaxError", "TraceRejected")


async def test_a_cancelled_trace_is_none(client: Client, bus: Bus, recorded: Recorded) -> None:
    spans, exporter = recorded
    gate = Gate()
    async with serving(bus, ScriptedEngine(gate), spans=spans):
        await client.models.get("tiny", timeout=PATIENCE)
        trace = client.trace("tiny", "hello", acts, max_tokens=20)
        await trace.accepted()
        await trace.cancel()
        gate.open()
        assert await trace.until_done() == "cancelled"
        await until(lambda: bool(exporter.get_finished_spans()))
    (span,) = exporter.get_finished_spans()
    assert (span.status.status_code, attributes(span)["tracewire.status"]) == (StatusCode.UNSET, "cancelled")


async def test_each_of_several_prompts_has_a_span_below_the_run(client: Client, bus: Bus, recorded: Recorded) -> None:
    spans, exporter = recorded
    async with serving(bus, free(), spans=spans):
        await client.models.get("tiny", timeout=PATIENCE)
        prompts = [Prompt(text, max_tokens=tokens) for text, tokens in (("a", 2), ("b", 4))]
        span = await ran(client, exporter, prompts=prompts)
    found = named(exporter, "prompt")
    assert [one.parent.span_id for one in found] == [span.context.span_id] * 2  # type: ignore[union-attr]
    assert sorted(attributes(one)["tracewire.invoke"] for one in found) == [0, 1]
    assert sorted(attributes(one)["tracewire.output_tokens"] for one in found) == [2, 4]
    assert all([event.name for event in one.events] == ["tracewire.first_token"] for one in found)
    assert all(attributes(one)["gen_ai.response.finish_reasons"] == ("length",) for one in found)
    assert attributes(span)["gen_ai.usage.output_tokens"] == 6


async def test_an_attempt_that_is_not_sampled_passes_its_context_on(bus: Bus) -> None:
    provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    context = {"traceparent": f"00-{CALLER.trace_id:032x}-{CALLER.span_id:016x}-00"}
    entry = Taken("t", {}, 0.0)
    span = TraceSpans(provider.get_tracer("t")).begin(entry, submission("t", context=context), 1, "e")
    assert not span.recording
    assert span.context["traceparent"].startswith(f"00-{CALLER.trace_id:032x}-")
    assert span.context["traceparent"].endswith("-00")


def test_a_trace_that_is_slowed_tells_so(recorded: Recorded) -> None:
    spans, exporter = recorded
    span = spans.begin(Taken("t", {}, 0.0), submission("t"), 1, "e")
    span.event(Lagging(attempt=1, seq=1, action="held", nbytes=7))
    span.end("EngineLost")
    (ended,) = exporter.get_finished_spans()
    (event,) = ended.events
    assert (event.name, dict(event.attributes or {})) == ("tracewire.lagging", {"action": "held", "nbytes": 7})


def test_of_two_finals_the_last_counts(recorded: Recorded) -> None:
    """Redis had no memory for the first."""
    spans, exporter = recorded
    span = spans.begin(Taken("t", {}, 0.0), submission("t"), 1, "e")
    for status in ("finished", "failed"):
        span.event(Final(attempt=1, seq=1, status=status))  # type: ignore[arg-type]
    span.end()
    assert attributes(exporter.get_finished_spans()[0])["tracewire.status"] == "failed"


async def test_what_is_logged_about_a_trace_has_the_ids_of_its_span(
    client: Client, bus: Bus, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans, exporter = recorded
    lines: list[dict[str, Any]] = []
    engine = free()
    plain = engine.start

    async def logging_start(*arguments: Any) -> Any:
        record = logging.LogRecord("tracewire", logging.INFO, __file__, 1, "begun", None, None)
        lines.append(json.loads(JsonFormatter().format(record)))
        return await plain(*arguments)

    monkeypatch.setattr(engine, "start", logging_start)
    async with serving(bus, engine, spans=spans):
        await client.models.get("tiny", timeout=PATIENCE)
        span = await ran(client, exporter, "hello", acts, max_tokens=2)
    (line,) = lines
    assert line["otel_span_id"] == span_id(span)
    assert line["otel_trace_id"] == f"{CALLER.trace_id:032x}"


async def test_a_collector_that_does_not_answer_stops_no_trace_and_no_adapter(
    client: Client, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More traces than the queue of spans holds run to their ends while the exporter's thread waits."""
    monkeypatch.setattr(span_export, "FLUSH_S", 0.01)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    stuck = Stuck()
    try:
        with span_export.exporting(stuck, "s", "i", "v") as provider:
            async with serving(bus, free(), spans=TraceSpans(provider.get_tracer("test"))) as adapter:
                await client.models.get("tiny", timeout=PATIENCE)
                for number in range(30):
                    await client.trace("tiny", f"{number}", acts, max_tokens=2).result()
                await until(stuck.asked.is_set)
            assert adapter.ended.is_set()
    finally:
        stuck.released.set()


async def test_an_engine_without_an_exporter_makes_no_span(client: Client, bus: Bus) -> None:
    async with serving(bus, free()) as adapter:
        await client.models.get("tiny", timeout=PATIENCE)
        await client.trace("tiny", "hello", acts, max_tokens=5).result()
        assert adapter._intake._services.spans is None
