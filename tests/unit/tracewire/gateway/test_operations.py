"""Readiness and metrics."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support import ROOT
from tests.support.bus_engine import engine_info, tiny
from tests.support.gateways import Served
from tracewire_bus.bus import Bus

Engine = Callable[..., Any]


async def metrics(served: Served) -> dict[tuple[str, tuple[str, ...]], float]:
    """The samples of all metrics by name and labels' values."""
    async with served.http() as http:
        text = (await http.get("/metrics")).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, tuple(sample.labels.values())] = sample.value
    return found


async def test_requests_tokens_and_times_are_counted(engine: Engine, served: Served) -> None:
    async with engine(tiny), served.openai() as api, served.http() as http:
        await api.completions.create(model="tiny", prompt="x")
        async for _ in await api.completions.create(model="tiny", prompt="x", stream=True):
            pass
        for _ in range(3):
            await http.get("/traces/nowhere")
        await http.post("/v1/completions", json={"model": "never", "prompt": "x"})
        await http.post("/traces/nowhere/steer", json={"values": {"a": 1}})
        found = await metrics(served)
    assert found["tracewire_gateway_requests_total", ("POST", "/v1/completions", "200")] == 2
    assert found["tracewire_gateway_requests_total", ("GET", "/traces/{trace_id}", "404")] == 3
    assert found["tracewire_gateway_tokens_total", ("tiny",)] == 6
    assert found["tracewire_gateway_first_output_seconds_count", ("tiny",)] == 2
    assert found["tracewire_gateway_inter_token_seconds_count", ("tiny",)] == 4
    assert found["tracewire_gateway_request_seconds_count", ("/v1/completions",)] == 3
    assert found["tracewire_gateway_delta_bytes_total", ("tiny",)] > 0
    assert found["tracewire_gateway_steers_total", ("refused",)] == 1
    # The request for the metrics is one.
    assert found["tracewire_gateway_running_requests", ()] == 1
    # What a caller makes up is no label.
    assert not any("never" in labels or "nowhere" in labels for _, labels in found)


async def test_the_metrics_are_those_of_the_page(engine: Engine, served: Served) -> None:
    rows = re.findall(r"^\| (`tracewire_.*?) \|", (ROOT / "docs" / "gateway.md").read_text(), re.M)
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    registry = served.gateway.metrics.registry
    names = {metric.name + ("_total" if metric.type == "counter" else "") for metric in registry.collect()}
    assert documented == names


async def test_engines_and_queues_are_counted(engine: Engine, served: Served) -> None:
    async with engine(engine="one", running=2, capacity=4), engine(engine="two", state="draining"):
        found = await metrics(served)
        assert found["tracewire_engines", ("tiny", "serving")] == found["tracewire_engines", ("tiny", "draining")] == 1
        assert found["tracewire_engine_running_traces", ("one", "tiny")] == 2
        assert found["tracewire_engine_capacity", ("one", "tiny")] == 4
    found = await metrics(served)
    assert not any(name.startswith("tracewire_engine") for name, _ in found)


async def test_submissions_that_wait_are_counted(bus: Bus, served: Served) -> None:
    await bus.registry.register(engine_info(), ttl_s=600)
    async with served.http() as http:
        for _ in range(3):
            await http.post("/traces", json={"model": "tiny", "prompt": "x"})
    assert (await metrics(served))["tracewire_queue_waiting", ("tiny",)] == 3


async def test_the_document_of_the_api_has_all_routes(served: Served) -> None:
    async with served.http() as http:
        document = (await http.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/traces/{trace_id}/events", "/edits/{model}/{name}"} < document["paths"].keys()
    body = document["components"]["schemas"]["CompletionBody"]["properties"]
    assert body["prompt"]["examples"] == ["def add(a, b):"]
