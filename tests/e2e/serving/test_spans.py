"""A real engine's spans, and vLLM's own below them, as a collector gets them."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry.trace import SpanKind

import tracewire
from tests.support.blocks import tracing as blocks
from tests.support.engine_process import running_engine
from tests.support.spans import collector, of_this_process, span_id
from tracewire_bus.transport.embedded import EmbeddedServer


@pytest.mark.full
@pytest.mark.usefixtures("starts_engine")
async def test_vllm_s_spans_are_below_the_run_of_a_trace(tmp_path: Path) -> None:
    provider, ended = of_this_process()
    async with EmbeddedServer.start() as server:
        with collector() as collected:
            environment = {
                "OTEL_EXPORTER_OTLP_ENDPOINT": collected.url,
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            }
            options = ["--tracing", "--otlp-traces-endpoint", f"{collected.url}/v1/traces"]
            with running_engine(server.url, tmp_path, *options, environment=environment):
                async with tracewire.connect(server.url) as client:
                    with provider.get_tracer("test").start_as_current_span("caller"):
                        result = await client.trace("demo", "def f(", blocks.two_names, max_tokens=8).result()
    (mine,) = (span for span in ended.get_finished_spans() if span.kind == SpanKind.CLIENT)
    run = collected.named("text_completion demo")
    assert (run.parent, run.trace) == (span_id(mine), f"{mine.context.trace_id:032x}")
    assert run.attributes["gen_ai.usage.output_tokens"] == len(result.token_ids) == 8
    assert run.attributes["gen_ai.usage.input_tokens"] == result.usage.prompt_tokens
    assert run.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert run.attributes["gen_ai.request.max_tokens"] == 8
    assert collected.named("queue demo").parent == span_id(mine)
    assert "llm_request" in collected.below(run)
    # The trial request at the start is no trace.
    assert [one.parent for one in collected.spans if one.name == "llm_request" and one.trace == run.trace] == [run.id]
