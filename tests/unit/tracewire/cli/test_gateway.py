"""`tracewire gateway`, as a process and as a command that ends at once."""

# ruff: noqa: ASYNC220

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import openai
import pytest

from tests.support import ROOT
from tests.support.scripted_engine import ScriptedEngine, serving
from tests.support.spans import collector
from tests.unit.tracewire.cli.test_main import command
from tracewire.gateway.keys import Keys
from tracewire_bus.bus import Bus
from tracewire_bus.span_export import exporting, otlp_exporter
from tracewire_engine.adapter.trace_spans import TraceSpans

Engine = Callable[..., Any]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "there are no keys"),
        (["--keys", "/nowhere/keys.toml"], "No such file"),
        (["--tls-key", "k.pem"], "--tls-certificate"),
        (["--new-key", "a b"], "name: expected letters"),
        (["--new-key", "a", "--rights", "write"], "'write' is none of"),
    ],
)
async def test_what_cannot_be_served(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await command("gateway", "--url", "redis://localhost", "--port", "0", *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("tracewire: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--port", "65536"], "argument --port: expected a port from 0 to 65535, got 65536"),
        (["--port", "-1"], "argument --port: expected a port from 0 to 65535, got -1"),
        (["--concurrency", "-1"], "argument --concurrency: expected a number of requests, or 0 for any, got -1"),
        (["--drain", "nan"], "argument --drain: expected seconds, such as 30, got nan"),
    ],
)
async def test_a_wrong_number_names_its_option(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        await command("gateway", "--url", "redis://localhost", *words)
    assert left.value.code == 2
    assert says in capsys.readouterr().err


async def test_a_taken_port_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert await command("gateway", "--url", "redis://localhost", "--port", port) == 2
    error = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; --host and --port choose another" in error


async def test_a_redis_that_does_not_answer_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert await command("gateway", "--url", "unix:///nowhere/redis.sock", "--port", "0") == 1
    error = capsys.readouterr().err
    assert error.startswith("tracewire: cannot connect: no Redis answers at unix:///nowhere/redis.sock")
    assert error.count("\n") == 1


async def test_a_new_key_can_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await command("gateway", "--new-key", "alice", "--rights", "read,submit", "--tenant", "red") == 0
    said = capsys.readouterr().out
    key = said.splitlines()[0].rpartition(" ")[2]
    file = tmp_path / "keys.toml"
    file.write_text(said)
    caller = Keys(file).caller(f"Bearer {key}")
    assert (caller.name, caller.tenant, caller.rights) == ("alice", "red", {"read", "submit"})


async def test_a_process_serves_until_sigterm(engine: Engine, redis_url: str, prefix: str) -> None:
    options = ["--url", redis_url, "--prefix", prefix, "--port", "0", "--drain", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tracewire.cli", "gateway", *options], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        url = (await anyio.to_thread.run_sync(process.stdout.readline)).split()[1]
        async with engine(), openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as api:
            answer = await api.completions.create(model="tiny", prompt="x")
            assert answer.choices[0].text == "one two three"
        process.send_signal(signal.SIGTERM)
        assert await anyio.to_thread.run_sync(process.wait) == 0
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient() as http:
                await http.get(f"{url}/healthz")
    finally:
        process.kill()
        process.wait()


async def test_a_request_s_spans_are_one_tree_from_the_gateway_to_the_final(
    bus: Bus, redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway's process and the adapter each send theirs to a collector, by OTLP."""
    caller = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    options = ["--url", redis_url, "--prefix", prefix, "--port", "0", "--drain", "1", "--tracing"]
    with collector() as collected:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collected.url)
        process = subprocess.Popen(
            [sys.executable, "-m", "tracewire.cli", "gateway", *options], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        try:
            assert process.stdout is not None
            url = (await anyio.to_thread.run_sync(process.stdout.readline)).split()[1]
            with exporting(otlp_exporter(), "tracewire-engine", "one", "1") as provider:
                spans = TraceSpans(provider.get_tracer("tracewire"))
                async with (
                    serving(bus, ScriptedEngine(partial(anyio.sleep, 0)), spans=spans) as adapter,
                    openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as api,
                ):
                    await adapter.serving.wait()
                    answer = await api.completions.create(model="tiny", prompt="x", max_tokens=3, extra_headers=caller)
                    assert answer.usage is not None
                    assert answer.usage.completion_tokens == 3
            process.send_signal(signal.SIGTERM)
            assert await anyio.to_thread.run_sync(process.wait) == 0
        finally:
            process.kill()
            process.wait()
    request = collected.named("POST /v1/completions")
    assert (request.trace, request.parent) == tuple(caller["traceparent"].split("-")[1:3])
    assert collected.below(request) == ["text_completion tiny"]
    (trace,) = (one for one in collected.spans if one.parent == request.id)
    assert collected.below(trace) == ["queue tiny", "text_completion tiny"]
    assert len(collected.spans) == 4
    assert {one.trace for one in collected.spans} == {request.trace}
    assert [one.service for one in (request, trace)] == ["tracewire-gateway"] * 2
    for run in (one for one in collected.spans if one.parent == trace.id):
        assert run.service == "tracewire-engine"
        assert request.begin <= trace.begin <= run.begin
        assert run.attributes["tracewire.trace_id"] == request.attributes["tracewire.trace_id"]


async def test_tracing_without_its_extra_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "tracewire_bus.span_export", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert await command("gateway", "--url", "redis://localhost", "--port", "0", "--tracing") == 1
    assert "--tracing needs opentelemetry.exporter" in (error := capsys.readouterr().err)
    assert "pip install 'tracewire[tracing]'" in error


def test_no_other_command_loads_what_the_gateway_needs() -> None:
    code = "import sys, tracewire.cli.main as m; m.build_parser(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "tracewire.cli.gateway" in loaded
    assert not {"fastapi", "uvicorn", "prometheus_client", "pydantic", "tracewire.gateway"} & set(loaded)
