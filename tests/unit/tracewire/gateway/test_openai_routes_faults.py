"""OpenAI's API while things break: engines, the bus, a gateway."""

# ruff: noqa: ASYNC220

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import httpx
import openai
import pytest

from tests.support import ROOT
from tests.support.bus_engine import Stage
from tests.support.gateways import Served, serving
from tests.support.sse import events
from tests.support.until import until
from tracewire_bus.transport.embedded import EmbeddedServer
from tracewire_bus.wire.ids import FINAL_ID
from tracewire_bus.wire.messages import Failure

Engine = Callable[..., Any]


async def test_an_engine_that_was_lost_too_often_can_be_asked_again(engine: Engine, served: Served) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output("one")
        await stage.final("failed", Failure(type="EngineLost", message="it was killed"))

    async with engine(script), served.openai() as api, served.http() as http:
        answer = await http.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
        assert (answer.status_code, answer.headers["X-Should-Retry"]) == (503, "true")
        assert "Retry-After" in answer.headers
        with pytest.raises(openai.APIError) as caught:
            async for _ in await api.completions.create(model="tiny", prompt="x", stream=True):
                pass
        assert caught.value.code == "engine_lost"
        assert caught.value.body["tracewire"]["position"] == "1-1"


async def test_a_trace_that_no_engine_takes_in_time_is_answered_by_its_stream(
    engine: Engine, gateway: Callable[..., Any]
) -> None:
    take = anyio.Event()

    async def script(stage: Stage) -> None:
        await take.wait()
        await stage.final("rejected", Failure(type="Rejection", message="expected less", field="sampling.top_p"))

    async with engine(script), gateway(accept_s=0.05, keep_alive_s=0.05) as served, served.http() as http:
        body = {"model": "tiny", "prompt": "x", "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            # Its trace can be followed and cancelled before an engine has it.
            first = json.loads((await anext(lines)).removeprefix("data: "))
            assert first["tracewire"]["trace_id"] == answer.headers["Tracewire-Trace-Id"]
            while not (await anext(lines)).startswith(":"):
                pass
            take.set()
            rest = [line async for line in lines if line.startswith("data: ")]
        error = json.loads(rest[0].removeprefix("data: "))["error"]
        assert (error["param"], error["type"]) == ("top_p", "invalid_request_error")
        assert rest[1:] == ["data: [DONE]"]


async def test_a_full_queue_says_when_there_is_room(engine: Engine, served: Served, bus: Any) -> None:
    from tests.support.bus_engine import engine_info

    await bus.registry.register(engine_info(model="small", queue_limit=1), ttl_s=600)
    async with served.http() as http:
        for _ in range(3):
            answer = await http.post("/traces", json={"model": "small", "prompt": "x"})
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:tracewire:overloaded")
        assert int(answer.headers["Retry-After"]) >= 1


async def test_a_bus_that_is_away_is_an_answer_and_no_hanging_request(prefix: str) -> None:
    redis = EmbeddedServer.start()
    async with redis as running, serving(running.url, prefix, patience_s=0.3) as served, served.http() as http:
        assert (await http.get("/readyz")).status_code == 200
        await running.aclose()
        for method, path, body in (
            ("POST", "/v1/completions", {"model": "tiny", "prompt": "x"}),
            ("POST", "/traces", {"model": "tiny", "prompt": "x"}),
            ("GET", "/traces", None),
            ("GET", "/traces/t", None),
            ("GET", "/engines", None),
        ):
            answer = await http.request(method, path, json=body)
            assert answer.status_code == 503, (path, answer.text)
            assert "Retry-After" in answer.headers
        assert (await http.get("/readyz")).status_code == 503
        assert (await http.get("/healthz")).status_code == 200


TOKENS = 20


@pytest.mark.parametrize("streams", [20, pytest.param(200, marks=pytest.mark.full)])
async def test_clients_of_a_gateway_that_is_killed_go_on_at_another(
    engine: Engine, served: Served, redis_url: str, prefix: str, streams: int
) -> None:
    go_on = anyio.Event()

    async def script(stage: Stage) -> None:
        await stage.accept()
        for number in range(TOKENS):
            if number == TOKENS // 2:
                await go_on.wait()
            await stage.save(f"{number} ", {"n": number})
        await stage.final()

    options = ["--url", redis_url, "--prefix", prefix, "--port", "0"]
    command = [sys.executable, "-m", "tracewire.cli", "gateway", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        url = (await anyio.to_thread.run_sync(process.stdout.readline)).split()[1]
        found: list[tuple[str, list[int]]] = []
        halfway = []

        async def follow() -> None:
            text, values, last, trace_id = "", [], "", ""
            body = {"model": "tiny", "prompt": "x", "stream": True, "tracewire": {"detach": True}}
            async with httpx.AsyncClient(timeout=60) as http:
                try:
                    async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
                        trace_id = answer.headers["Tracewire-Trace-Id"]
                        async for event in events(answer):
                            text += event.data["choices"][0]["text"]
                            values += event.data["tracewire"].get("delta", {}).get("n", [])
                            last = event.id or last
                            if len(values) == TOKENS // 2:
                                halfway.append(trace_id)
                except httpx.HTTPError:
                    pass
                headers = {"Last-Event-ID": last}
                path = f"{served.url}/traces/{trace_id}/events"
                async with http.stream("GET", path, headers=headers) as answer:
                    async for event in events(answer):
                        text += event.data.get("text", "")
                        values += event.data.get("delta", {}).get("n", [])
                        last = event.id
            assert last == FINAL_ID
            found.append((text, values))

        async with engine(script), anyio.create_task_group() as group:
            for _ in range(streams):
                group.start_soon(follow)
            await until(lambda: len(halfway) == streams)
            process.send_signal(signal.SIGKILL)
            go_on.set()
        whole = "".join(f"{number} " for number in range(TOKENS))
        assert found == [(whole, list(range(TOKENS)))] * streams
    finally:
        process.kill()
        await anyio.to_thread.run_sync(partial(process.wait, 60))


async def test_a_slow_reader_holds_nobody(engine: Engine, gateway: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        for _ in range(300):
            await stage.output("x" * 50_000)
        await stage.final()

    async with engine(script), gateway(stall_s=0.3) as served, served.http() as http, served.openai() as api:
        body = {"model": "tiny", "prompt": "x", "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as slow:
            trace_id = slow.headers["Tracewire-Trace-Id"]
            answer = await api.completions.create(model="tiny", prompt="x")
            assert len(answer.choices[0].text) == 300 * 50_000
            await until(lambda: not len(served.gateway.streams))
        state = (await http.get(f"/traces/{trace_id}")).json()
        # Its trace had ended already, or it was cancelled as one whose client has left.
        assert state["status"] in ("finished", "cancelled")
