"""Engines that are asked to leave while there is work, and who is told what."""

# ruff: noqa: ASYNC110, ASYNC220
from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import psutil
import pytest

import tracewire
from tests.faults.test_engine_loss import Gate, free
from tests.support.bus_engine import engine_info
from tests.support.engine_process import running_engine
from tests.support.scripted_engine import ScriptedEngine, acts, expected, info, serving
from tracewire import Client, Final, Output, Restarted
from tracewire.cli import engines as engine_commands
from tracewire.cli import main as cli
from tracewire_bus.bus import Bus
from tracewire_bus.store.control import drain_command
from tracewire_bus.transport.embedded import EmbeddedServer
from tracewire_bus.wire.messages import ModuleInfo, Versions
from tracewire_engine.launch.cli import _stranger

PATIENCE = 20


@pytest.fixture
async def client(embedded: str, prefix: str) -> AsyncIterator[Client]:
    """A client on the session's Redis."""
    async with tracewire.connect(embedded, prefix=prefix) as client:
        yield client


async def command(*arguments: str) -> int:
    """Run the command as a program would, with an event loop of its own."""
    return await anyio.to_thread.run_sync(partial(cli.main, list(arguments)))


async def started(client: Client, prompt: str, tokens: int = 12, **options: Any) -> tracewire.Trace:
    """A trace that was submitted, whose end nobody waits for."""
    trace = client.trace("tiny", prompt, acts, max_tokens=tokens, detach=True, **options)
    await trace.start()
    return trace


async def runs(trace: tracewire.Trace) -> None:
    """Wait until it has a token."""
    with anyio.fail_after(PATIENCE):
        async for item in trace:
            if isinstance(item, Output):
                return


async def whole(client: Client, trace: str, prompt: str, tokens: int = 12) -> list[Any]:
    """All events of a trace, which finished, once, with all that it should have."""
    with anyio.fail_after(PATIENCE):
        events = [event async for event in client.subscribe(trace)]
    assert [type(event) for event in events].count(Final) == 1
    assert events[-1].status == "finished", events[-1]
    state = await client.get_state(trace)
    assert state.token_ids == expected(prompt, tokens)[0]
    return events


async def in_state(client: Client, engine: str, state: str) -> None:
    """Wait until the registry says so."""
    with anyio.fail_after(PATIENCE):
        while [one.state for one in await client.engines.list() if one.name == engine] != [state]:
            await anyio.sleep(0.01)


@asynccontextmanager
async def engine(bus: Bus, name: str, pace: Any = None, **settings: Any) -> AsyncIterator[Any]:
    """An engine of this name, and its adapter."""
    scripted = free() if pace is None else ScriptedEngine(pace)
    async with serving(bus, scripted, info(engine=name, host="here"), **settings) as adapter:
        yield adapter


async def test_a_draining_engine_takes_nothing_new_finishes_and_leaves(client: Client, bus: Bus) -> None:
    gate = Gate()
    async with engine(bus, "leaving", gate) as leaving:
        await client.models.get("tiny", timeout=PATIENCE)
        first = await started(client, "first")
        gate.step(3)
        await runs(first)
        drain = await client.engines.drain("leaving")
        assert (drain.engine.name, drain.others, drain.waiting) == ("leaving", (), 0)
        await in_state(client, "leaving", "draining")
        # It takes none of these: they wait, until another comes.
        later = [await started(client, f"later {number}") for number in range(5)]
        assert await bus.queue.waiting("tiny") == 5
        assert not leaving.ended.is_set()
        async with Bus.open(bus.url, prefix=bus.keys.prefix) as other, engine(other, "staying"):
            for number, trace in enumerate(later):
                events = await whole(client, trace.id, f"later {number}")
                assert {event.engine for event in events if isinstance(event, tracewire.Accepted)} == {"staying"}
            gate.open()
            events = await whole(client, first.id, "first")
            assert not any(isinstance(event, Restarted) for event in events)
            with anyio.fail_after(PATIENCE):
                await drain.wait()
                await leaving.ended.wait()
            assert [one.name for one in await client.engines.list()] == ["staying"]
            assert leaving.draining.is_set()
            assert not leaving.lost
    for trace in (first, *later):
        await trace.aclose()


async def test_what_has_not_ended_in_time_runs_anew_elsewhere(client: Client, bus: Bus) -> None:
    async with engine(bus, "leaving", partial(anyio.sleep, 0.02)) as leaving:
        await client.models.get("tiny", timeout=PATIENCE)
        trace = await started(client, "slow", 2000, max_attempts=2)
        only = await started(client, "once", 2000, on_engine_loss="fail")
        await runs(trace)
        await runs(only)
        drain = await client.engines.drain("leaving", timeout=0.05)
        with anyio.fail_after(PATIENCE):
            await drain.wait()
            await leaving.ended.wait()
        assert await bus.queue.waiting("tiny") == 1
    async with engine(bus, "next"):
        events = await whole(client, trace.id, "slow", 2000)
    (restart,) = [event for event in events if isinstance(event, Restarted)]
    assert (restart.attempt, restart.seq) == (2, 0)
    assert "shut down" in restart.reason
    state = await client.get_state(only.id)
    assert state.status == "failed"
    assert state.error is not None
    assert state.error.type == "EngineShutdown"
    for one in (trace, only):
        await one.aclose()


async def test_asking_again_does_no_harm_and_the_earliest_end_counts(client: Client, bus: Bus) -> None:
    async with engine(bus, "leaving", Gate()) as leaving:
        await client.models.get("tiny", timeout=PATIENCE)
        trace = await started(client, "never steps")
        with anyio.fail_after(PATIENCE):
            while not leaving.busy:
                await anyio.sleep(0.01)
        for timeout in (None, 3600, None):
            await client.engines.drain("leaving", timeout=timeout)
        await in_state(client, "leaving", "draining")
        drain = await client.engines.drain("leaving", timeout=0)
        with anyio.fail_after(PATIENCE):
            await leaving.ended.wait()
            await drain.wait()
        with pytest.raises(tracewire.UnknownEngine):
            await client.engines.drain("leaving")
    assert await bus.queue.waiting("tiny") == 1
    await client.cancel(trace.id)
    await trace.aclose()


async def test_a_signal_ends_a_drain_that_has_no_end(client: Client, bus: Bus) -> None:
    async with engine(bus, "leaving", Gate(), drain_s=0.05) as leaving:
        await client.models.get("tiny", timeout=PATIENCE)
        trace = await started(client, "never steps")
        with anyio.fail_after(PATIENCE):
            while not leaving.busy:
                await anyio.sleep(0.01)
        await client.engines.drain("leaving")
        await in_state(client, "leaving", "draining")
        leaving.stop()
        with anyio.fail_after(PATIENCE):
            await leaving.ended.wait()
    await client.cancel(trace.id)
    await trace.aclose()


async def test_an_order_without_a_time_has_none_and_one_with_a_malformed_time_is_passed_over(bus: Bus) -> None:
    key = bus.keys.control(bus.keys.tags[0], "e")
    await bus.command(*drain_command(bus.keys, "e", "nobody", None, 60))
    for malformed in ("soon", "-1", "nan"):
        await bus.command("XADD", key, "*", "k", "drain", "t", "", "b", "", "w", malformed)
    await bus.command("XADD", key, "*", "k", "drain", "t", "", "b", "")
    await bus.command(*drain_command(bus.keys, "e", "somebody", 2.5, 60))
    reader = bus.control("e")
    orders = await reader.read(1000)
    await reader.aclose()
    assert [(order.kind, order.within_s) for order in orders] == [("drain", None), ("drain", None), ("drain", 2.5)]
    assert orders[-1].by == "somebody"
    assert 0 < await bus.command("TTL", key) <= 60


async def test_what_cannot_be_drained_is_refused_with_the_reason(client: Client, bus: Bus) -> None:
    with pytest.raises(tracewire.UnknownEngine, match="no engine is registered at all"):
        await client.engines.drain("nobody")
    await bus.registry.register(engine_info("tiny", "early", schema="1.0"))
    with pytest.raises(tracewire.UnknownEngine, match="live now: early"):
        await client.engines.drain("nobody")
    with pytest.raises(tracewire.EngineTooOld, match="SIGTERM"):
        await client.engines.drain("early")
    for timeout in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout"):
            await client.engines.drain("early", timeout=timeout)


# --- several engines of a model ---------------------------------------------------------------------------------------


async def test_one_client_sees_the_engines_of_all_models(client: Client, bus: Bus) -> None:
    await bus.registry.register(engine_info("left", "l1", capacity=4, running=1, started_at=1.0, host="a"))
    await bus.registry.register(engine_info("left", "l2", capacity=6, started_at=2.0, state="draining"))
    await bus.registry.register(engine_info("right", "r1", versions=Versions(vllm="0.32.0")))
    assert [(one.name, one.capacity, one.running) for one in await client.models.list()] == [
        ("left", 10, 1),
        ("right", 16, 0),
    ]
    engines = await client.engines.list()
    assert [(one.name, one.model, one.state, one.ready) for one in engines] == [
        ("l1", "left", "serving", True),
        ("l2", "left", "draining", False),
        ("r1", "right", "serving", True),
    ]
    assert engines[0].host == "a"
    assert engines[2].versions["vllm"] == "0.32.0"
    assert [one.name for one in await client.engines.list(model="right")] == ["r1"]


@tracewire.intervention
def reads_norm(model, tracer, live):
    for step in tracer.iter[:]:
        norm = model.model.norm.output[-1].save()


async def test_a_block_must_fit_every_engine_that_may_take_it(client: Client, bus: Bus) -> None:
    one = engine_info("tiny", "one", started_at=1.0)
    fewer = [module for module in one.modules if module.path != "model.norm"]
    other = engine_info("tiny", "other", started_at=2.0, modules=fewer, revision="next")
    await bus.registry.register(one)
    async with client.trace("tiny", "a", reads_norm, detach=True) as trace:
        pass
    await client.cancel(trace.id)
    await bus.registry.register(other)
    (model,) = await client.models.list()
    assert model.differs == ("revision", "module tree")
    with pytest.raises(tracewire.UnknownModulePath, match=r"model\.norm"):
        async with client.trace(await client.models.get("tiny"), "a", reads_norm, detach=True):
            pass
    await bus.registry.unregister("other")
    async with client.trace(await client.models.get("tiny"), "a", reads_norm, detach=True) as trace:
        pass
    await client.cancel(trace.id)


async def test_an_engine_of_another_model_under_the_same_name_is_refused(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    ours = engine_info("tiny", "ours", hidden_size=16)
    assert await _stranger(bus, ours) == ""
    there = engine_info("tiny", "there")
    await bus.registry.register(there)
    said = await _stranger(bus, ours)
    assert "engine there serves another model as 'tiny'" in said
    assert "hidden_size 16, not 8" in said
    assert await _stranger(bus, engine_info("other", "ours", hidden_size=16)) == ""
    # One that differs in less is told of.
    assert await _stranger(bus, engine_info("tiny", "ours", dtype="float32", modules=[ModuleInfo("", "M")])) == ""
    assert "differs in: dtype, module tree" in caplog.text
    # One that leaves does not count.
    await bus.registry.register(msgspec.structs.replace(there, state="draining"))
    assert await _stranger(bus, ours) == ""


# --- the command ------------------------------------------------------------------------------------------------------


async def test_the_command_lists_probes_and_drains(
    client: Client, embedded: str, prefix: str, bus: Bus, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    where = ("--url", embedded, "--prefix", prefix)
    assert await command("ready", *where) == 1
    assert capsys.readouterr().err == "tracewire: no engine serves\n"
    assert await command("drain", "nobody", *where) == 1
    assert "no engine is called 'nobody'" in capsys.readouterr().err
    assert await command("drain", *where) == 2
    assert await command("drain", "--host", "elsewhere", *where) == 1
    assert await command("drain", "nobody", "--timeout", "-1", *where) == 2
    assert await command("engines", "--json", *where) == 0
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
            assert await command("ready", *more, *where) == 0
            assert capsys.readouterr().out == "scripted\tserving\n"
        for more in (["another"], ["--model", "another"], ["--host", "another"], ["--host", "another", "--alive"]):
            assert await command("ready", *more, *where) == 1
            assert "another" in capsys.readouterr().err
        assert await command("engines", *where) == 0
        assert capsys.readouterr().out == f"scripted\ttiny\tserving\t0 of 256 traces\t{host}\n"
        assert await command("engines", "--json", "--model", "tiny", *where) == 0
        (said,) = json.loads(capsys.readouterr().out)
        assert (said["name"], said["model"], said["state"], said["capacity"]) == ("scripted", "tiny", "serving", 256)
        assert await command("drain", "--host", *where) == 0
        said = capsys.readouterr()
        assert said.out.splitlines() == ["scripted: asked to drain; it runs 0 traces", "scripted: has left"]
        assert said.err == ""
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
    assert await command("ready", *where) == 1


async def test_draining_the_last_engine_with_work_waiting_is_warned_of(
    client: Client, embedded: str, prefix: str, bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--url", embedded, "--prefix", prefix)
    async with serving(bus, free(), info(engine="full", capacity=0)):
        await client.models.get("tiny", timeout=PATIENCE)
        trace = await started(client, "waits")
        assert await command("drain", "full", "--no-wait", *where) == 0
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
    assert await command("ready", *where) == 1
    assert await command("ready", "--alive", *where) == 0
    assert "not known" in capsys.readouterr().err


# --- a real engine ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("starts_engine")
@pytest.mark.full
async def test_a_real_engine_drains_and_is_not_started_again(tmp_path: Path) -> None:
    async with EmbeddedServer.start() as server:
        with running_engine(server.url, tmp_path) as running:
            below = running.descendants()
            async with tracewire.connect(server.url) as client:
                trace = client.trace("demo", "def f(", max_tokens=100, ignore_eos=True, detach=True)
                await trace.start()
                await runs(trace)
                assert await command("ready", "--host", "--url", server.url) == 0
                assert await command("drain", "--host", "--url", server.url) == 0
                assert await client.engines.list() == []
                result = await trace.result()
                assert len(result.token_ids) == 100
                await trace.aclose()
            assert await anyio.to_thread.run_sync(running.process.wait, PATIENCE) == 0
            _, alive = psutil.wait_procs(below, timeout=PATIENCE)
            assert not alive
