"""`tracewire models`, `engines`, `ready` and `drain`."""

# ruff: noqa: ASYNC110, ASYNC220
from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from tests.support.bus_engine import BusEngine, engine_info, tiny
from tests.support.drained import engine, in_state, run_command, runs, started, whole
from tests.support.scripted_engine import info, serving
from tests.support.stepping import Gate, free
from tracewire import Client, ModelInfo
from tracewire.cli import engines as engine_commands
from tracewire.cli import main as cli
from tracewire_bus.bus import Bus


async def command(*arguments: str) -> int:
    """Run the command as a program would, with an event loop of its own."""
    return await anyio.to_thread.run_sync(partial(cli.main, list(arguments)))


async def test_models_lists_what_is_served(
    redis_url: str, prefix: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with BusEngine.running(redis_url, prefix, tiny):
        assert await command("models", "--url", redis_url, "--prefix", prefix) == 0
        assert capsys.readouterr().out == "tiny\t1 engine\t0 of 16 traces\tbfloat16\t4 layers of 8\t128 tokens\n"
        monkeypatch.setenv("TRACEWIRE_URL", redis_url)
        assert await command("models", "--prefix", prefix, "--tree") == 0
        assert "4 x LlamaDecoderLayer" in capsys.readouterr().out


async def test_models_as_json(redis_url: str, prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    async with BusEngine.running(redis_url, prefix, tiny, engine_info(engine="e1")):
        assert await command("models", "--json", "--url", redis_url, "--prefix", prefix) == 0
        (shown,) = json.loads(capsys.readouterr().out)
        assert (shown["name"], shown["engines"], shown["layer_count"]) == ("tiny", ["e1"], 4)
        assert set(shown) == {field.name for field in dataclasses.fields(ModelInfo)} - {"config"}
        assert await command("models", "--json", "--tree", "--url", redis_url, "--prefix", prefix) == 0
        (shown,) = json.loads(capsys.readouterr().out)
        assert "4 x LlamaDecoderLayer" in shown["tree"]


PATIENCE = 60


async def test_the_command_lists_probes_and_drains(
    client: Client, embedded: str, prefix: str, bus: Bus, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    where = ("--url", embedded, "--prefix", prefix)
    assert await run_command("ready", *where) == 1
    assert capsys.readouterr().err == (
        f"tracewire: no ready engine (tracewire engines lists them); looked on {embedded} with the prefix {prefix!r}\n"
    )
    assert await run_command("drain", "nobody", *where) == 1
    assert "no engine is called 'nobody'" in capsys.readouterr().err
    assert await run_command("drain", *where) == 2
    assert await run_command("drain", "--host", "elsewhere", *where) == 1
    assert await run_command("drain", "nobody", "--timeout", "-1", *where) == 2
    assert await run_command("engines", "--json", *where) == 0
    assert capsys.readouterr().out == "[]\n"

    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.scripted_engine", *where, "--engine", "scripted", "--rate", "1000"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        await client.models.get("tiny", timeout=60)
        host = socket.gethostname()
        for more in ([], ["scripted"], ["--model", "tiny"], ["--host"], ["--alive", "--host", host]):
            assert await run_command("ready", *more, *where) == 0
            assert capsys.readouterr().out == "scripted\tserving\n"
        for more in (["another"], ["--model", "another"], ["--host", "another"], ["--host", "another", "--alive"]):
            assert await run_command("ready", *more, *where) == 1
            assert "another" in capsys.readouterr().err
        assert await run_command("engines", *where) == 0
        assert capsys.readouterr().out == f"scripted\ttiny\tserving\t0 of 256 traces\t{host}\n"
        assert await run_command("engines", "--json", "--model", "tiny", *where) == 0
        (said,) = json.loads(capsys.readouterr().out)
        assert (said["name"], said["model"], said["state"], said["capacity"]) == ("scripted", "tiny", "serving", 256)
        assert await run_command("ready", "--json", *where) == 0
        assert json.loads(capsys.readouterr().out) == {"ready": True, "engine": "scripted", "state": "serving"}
        assert await run_command("drain", "--host", "--json", *where) == 0
        said = capsys.readouterr()
        assert [json.loads(line) for line in said.out.splitlines()] == [
            {"engine": "scripted", "event": "draining", "running": 0},
            {"engine": "scripted", "event": "left", "running": 0},
        ]
        assert said.err == ""
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
    assert await run_command("ready", *where) == 1
    assert await run_command("ready", "--json", *where) == 1
    assert json.loads(capsys.readouterr().out) == {"ready": False, "engine": None, "state": None}


async def test_draining_without_waiting_leaves_an_engine_to_its_traces(
    client: Client, embedded: str, prefix: str, bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--url", embedded, "--prefix", prefix)
    gate = Gate()
    async with engine(bus, "leaving", gate) as leaving:
        await client.models.get("tiny", timeout=PATIENCE)
        trace = await started(client, "held")
        gate.step()
        await runs(trace)
        with anyio.fail_after(PATIENCE):
            while [one.running for one in await client.engines.list()] != [1]:
                await anyio.sleep(0.01)
        assert await run_command("drain", "leaving", "--no-wait", *where) == 0
        assert capsys.readouterr() == ("leaving: asked to drain; it runs 1 traces\n", "")
        await in_state(client, "leaving", "draining")
        gate.open()
        with anyio.fail_after(PATIENCE):
            await leaving.ended.wait()
        await whole(client, trace.id, "held")
    await trace.aclose()


async def test_draining_the_last_engine_with_work_waiting_is_warned_of(
    client: Client, embedded: str, prefix: str, bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--url", embedded, "--prefix", prefix)
    async with serving(bus, free(), info(engine="full", capacity=0)):
        await client.models.get("tiny", timeout=PATIENCE)
        trace = await started(client, "waits")
        assert await run_command("drain", "full", "--no-wait", *where) == 0
        assert "no other engine serves 'tiny': the 1 submissions that wait" in capsys.readouterr().err
    async with serving(bus, free()):
        await whole(client, trace.id, "waits")
    await trace.aclose()


async def test_a_host_is_given_a_moment_to_be_in_the_registry_again(client: Client, bus: Bus) -> None:
    found: list[str] = []

    async def look() -> None:
        found.extend(await engine_commands.names_of_host(client, "here"))

    async with anyio.create_task_group() as group:
        group.start_soon(look)
        await anyio.lowlevel.checkpoint()
        await bus.registry.register(engine_info("tiny", "elsewhere", host="there"))
        await bus.registry.register(engine_info("tiny", "e", host="here"))
    assert found == ["e"]
    with anyio.fail_after(PATIENCE):
        assert await engine_commands.names_of_host(client, "nowhere") == []


async def test_a_probe_for_life_does_not_blame_an_engine_for_redis(capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--url", "unix:///nowhere/redis.sock")
    assert await run_command("ready", *where) == 1
    assert await run_command("ready", "--alive", *where) == 0
    assert "not known" in capsys.readouterr().err
