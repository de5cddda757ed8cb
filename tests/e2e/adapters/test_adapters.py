"""An engine with two adapters serves as one: traces are spread over both, and both end together."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import tracewire
from tests.support.blocks import tracing as blocks
from tests.support.engine_process import ENVIRONMENT, EngineProcess, running_engine
from tracewire import Client, Live, Model, Probe, Result, Steer
from tracewire_bus.bus import Bus
from tracewire_bus.transport.embedded import EmbeddedServer

PATIENCE = 300
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
READS = [Probe("all", "residual(*)"), Probe("one", "residual(2)", reduce="norm")]


@pytest.fixture
async def own_bus() -> AsyncIterator[str]:
    """A Redis of a test's own."""
    async with EmbeddedServer.start() as server:
        yield server.url


async def together(client: Client, model: Model, traces: list[dict[str, Any]]) -> list[tuple[str, Result]]:
    """The engine and the result of each of these traces, which run at once."""
    found: dict[int, tuple[str, Result]] = {}

    async def one(place: int) -> None:
        async with client.trace(model, f"def function_{place}(", **GREEDY, **traces[place]) as trace:
            accepted = await trace.accepted()
            found[place] = accepted.engine, await trace.result()

    async with anyio.create_task_group() as group:
        for place in range(len(traces)):
            group.start_soon(one, place)
    return [found[place] for place in range(len(traces))]


async def check_spread(client: Client, model: Model, engines: list[str]) -> None:
    vector = np.linspace(-1, 1, model.info.hidden_size, dtype=np.float32)
    kinds: list[dict[str, Any]] = [
        {"block": blocks.list_each_step()},
        {"interventions": READS},
        {"interventions": [Steer("residual(2)", vector), *READS]},
    ]
    wanted = [{"max_tokens": 24, **kinds[place % 3]} for place in range(12)]
    found = await together(client, model, wanted)
    assert {engine for engine, _ in found} == set(engines)
    for _, result in found:
        # Each save has been compared with the digest that the worker made of it.
        assert all(len(items) == 24 for items in result.saves.values())
    # Both read the same in the same trace, one of them as large arrays.
    probed = found[1][1].saves
    norms = [float(np.linalg.norm(np.asarray(items, np.float64)[2])) for items in probed["all"]]
    assert np.allclose(norms, np.asarray(probed["one"], np.float64), rtol=0.02)


async def check_control(client: Client, model: Model, engines: list[str]) -> None:
    """Pausing, steering and cancelling reach the adapter of the trace."""
    vector = np.ones(model.info.hidden_size, np.float32)
    seen: set[str] = set()
    traces: list[Any] = []
    async with anyio.create_task_group() as group:
        # Each adapter gets one before one of them is full.
        for number in range(16):
            trace = client.trace(
                *(model, f"def paused_{number}("),
                **GREEDY,
                max_tokens=900,
                live={"strength": 0.0},
                interventions=[Steer("residual(2)", vector, scale=Live("strength"))],
                detach=True,
            )
            await trace.start()
            traces.append(trace)
            seen.add((await trace.accepted()).engine)
            if seen == set(engines):
                break
        for trace in traces:
            await trace.pause()
            await trace.steer(strength=1.0)
            await trace.resume()
            await trace.cancel()
            group.start_soon(check_cancelled, client, trace)
    assert seen == set(engines)


async def check_cancelled(client: Client, trace: Any) -> None:
    events = [type(event).__name__ async for event in client.subscribe(trace.id)]
    assert "Steered" in events
    assert events[-1] == "Final"


@pytest.mark.usefixtures("starts_engine")
async def test_an_engine_with_two_adapters(own_bus: str, tmp_path: Path) -> None:
    options = ("--adapters", "2", "--capacity", "16", "--blob-threshold", "4096", "--log-format", "json")
    with running_engine(own_bus, tmp_path, *options) as engine:
        async with tracewire.connect(own_bus) as client, Bus.open(own_bus) as bus:
            model = await client.models.get("demo", timeout=PATIENCE)
            entries = sorted(await bus.registry.list(), key=lambda one: one.engine)
            engines = [one.engine for one in entries]
            assert engines == [engines[0], f"{engines[0]}.1"]
            assert [one.capacity for one in entries] == [8, 8]
            # They are one engine, and say nothing of each other.
            assert "serves demo too" not in engine.log.read_text()
            await check_spread(client, model, engines)
            await check_control(client, model, engines)
            await check_killed(client, bus, model, engine)
            # A drain of one is a drain of the engine.
            (first, _) = sorted(one.engine for one in await bus.registry.list())
            await client.engines.drain(f"{first}.1")
            with anyio.fail_after(PATIENCE):
                assert await anyio.to_thread.run_sync(engine.process.wait) == 0
            assert await bus.registry.list() == []
        assert [one for one in engine.below if one.is_running()] == []


@pytest.mark.full
@pytest.mark.usefixtures("starts_engine")
async def test_an_engine_that_cannot_start_ends_with_both_of_its_adapters(own_bus: str) -> None:
    """A supervisor, or Kubernetes, starts it again, which it cannot do if an adapter waits for the engine for ever."""
    options = ("--adapters", "2", "--restarts", "0", "--kv-cache-memory-bytes", "1000")
    command = [sys.executable, "-m", "tracewire.cli", "engine", "demo", "--url", own_bus, *options]
    with anyio.fail_after(PATIENCE):
        done = await anyio.run_process(command, env={**os.environ, **ENVIRONMENT}, check=False)
    assert done.returncode == 1, done.stderr[-2000:]
    assert b"the adapter exited with status 1" in done.stderr
    assert b"ready" not in done.stdout


async def check_killed(client: Client, bus: Bus, model: Model, engine: EngineProcess) -> None:
    """The adapter beside the first dies: both adapters come again, and the traces of both go on."""
    adapter = next(one for one in engine.descendants() if "spawn_main" in " ".join(one.cmdline()))
    before = {one.engine for one in await bus.registry.list()}
    wanted = {"max_tokens": 300, "interventions": READS, "max_attempts": 3}
    async with anyio.create_task_group() as group:
        results: list[tuple[str, Result]] = []

        async def run() -> None:
            results.extend(await together(client, model, [wanted] * 4))

        group.start_soon(run)
        running = 0
        while running < 4:
            running = sum(one.running for one in await bus.registry.list())
            await anyio.sleep(0.05)
        adapter.kill()
    assert all(len(result.token_ids) == 300 for _, result in results)
    assert len({one.engine for one in await bus.registry.list()} - before) == 2
