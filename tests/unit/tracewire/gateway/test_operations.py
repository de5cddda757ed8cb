"""Readiness and metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
from prometheus_client.parser import text_string_to_metric_families

from tests.support import ROOT
from tests.support.bus_engine import Stage, engine_info, tiny
from tests.support.gateways import Served
from tracewire.gateway.keys import entry_of
from tracewire_bus.bus import Bus, Taken

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
    told = {"running": 2, "capacity": 4, "waiting_bytes": 70, "edit_failures": {"calm": 2}}
    told["limits_reached"] = {"name": 3}
    async with engine(engine="one", **told), engine(engine="two", state="draining"):
        found = await metrics(served)
        assert found["tracewire_engines", ("tiny", "serving")] == found["tracewire_engines", ("tiny", "draining")] == 1
        assert found["tracewire_engine_running_traces", ("one", "tiny")] == 2
        assert found["tracewire_engine_capacity", ("one", "tiny")] == 4
        assert found["tracewire_engine_waiting_bytes", ("one", "tiny")] == 70
        assert found["tracewire_edit_failures", ("calm", "one", "tiny")] == 2
        assert found["tracewire_engine_limits_reached", ("one", "name", "tiny")] == 3
        assert not [labels for name, labels in found if name == "tracewire_edit_failures" and "two" in labels]
    found = await metrics(served)
    assert not any(name.startswith("tracewire_engine") for name, _ in found)


async def test_the_memory_of_redis_is_told(served: Served) -> None:
    found = await metrics(served)
    assert found["tracewire_redis_used_bytes", ()] > 100_000
    assert found["tracewire_redis_limit_bytes", ()] >= 0


async def test_submissions_that_wait_are_counted(bus: Bus, served: Served) -> None:
    await bus.registry.register(engine_info(), ttl_s=600)
    async with served.http() as http:
        for _ in range(3):
            await http.post("/traces", json={"model": "tiny", "prompt": "x"})
    found = await metrics(served)
    assert found["tracewire_queue_waiting", ("tiny",)] == 3
    first = found["tracewire_queue_oldest_seconds", ("tiny",)]
    assert first > 0
    assert (await metrics(served))["tracewire_queue_oldest_seconds", ("tiny",)] > first


async def test_dead_letters_are_counted(bus: Bus, served: Served) -> None:
    assert (await metrics(served))["tracewire_dead_letters", ()] == 0
    for trace in ("one", "two"):
        await bus.dead_letters.add("tiny", Taken(trace, {b"t": trace.encode()}, 0.0), "a reason")
    assert (await metrics(served))["tracewire_dead_letters", ()] == 2


async def test_a_change_is_timed_up_to_its_first_token(engine: Engine, served: Served) -> None:
    answered = anyio.Event()

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output("one")
        await stage.steered()
        # A change that is told of before the gateway knows its version is not timed.
        await answered.wait()
        await stage.tell()
        await stage.final()

    async with engine(script), served.openai() as api, served.http() as http:
        fields = {"tracewire": {"live": {"alpha": 0.0}, "trace_id": "t"}}
        stream = await api.completions.create(model="tiny", prompt="x", stream=True, extra_body=fields)
        chunks = stream.__aiter__()
        await anext(chunks)
        assert (await http.post("/traces/t/steer", json={"values": {"alpha": 1.0}})).status_code == 200
        answered.set()
        async for _ in chunks:
            pass
        found = await metrics(served)
    assert found["tracewire_gateway_steer_seconds_count", ("tiny",)] == 1
    assert found["tracewire_gateway_steers_total", ("accepted",)] == 1


async def test_the_dashboard_asks_for_metrics_that_exist(served: Served) -> None:
    board = json.loads((ROOT / "deploy" / "grafana" / "tracewire.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [one["query"] for one in board["templating"]["list"] if one["type"] == "query"]
    kinds = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    exist = {metric.name + end for metric in served.gateway.metrics.registry.collect() for end in kinds[metric.type]}
    named = {name for text in asked for name in re.findall(r"tracewire_\w+", text)}
    assert named <= exist
    # Each metric has its panel.
    assert {name.removesuffix("_bucket") for name in named} == {
        re.sub("_(bucket|sum|count)$", "", name) for name in exist
    }
    assert len({panel["title"] for panel in board["panels"]}) == len(board["panels"])


async def test_the_document_of_the_api_has_all_routes(served: Served) -> None:
    async with served.http() as http:
        document = (await http.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/traces/{trace_id}/events", "/edits/{model}/{name}"} < document["paths"].keys()
    body = document["components"]["schemas"]["CompletionBody"]["properties"]
    assert body["prompt"]["examples"] == ["def add(a, b):"]


async def test_a_key_is_described_to_its_caller(gateway: Callable[..., Any], served: Served, tmp_path: Path) -> None:
    async with served.http() as http:
        found = (await http.get("/key")).json()
    assert (found["name"], found["tenant"], len(found["rights"])) == ("anonymous", None, 5)
    file = tmp_path / "keys.toml"
    file.write_text(entry_of("k", "alice", frozenset({"read", "steer"}), "red"))
    async with gateway(keys=file) as other, other.http("k") as http:
        assert (await http.get("/key")).json() == {"name": "alice", "rights": ["read", "steer"], "tenant": "red"}
