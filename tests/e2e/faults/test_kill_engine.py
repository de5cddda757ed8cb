"""A real engine whose processes are killed in the middle: its supervisor starts it again, and its traces go on.

The new one is told to go, which it says on its way out.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import psutil
import pytest

import tracewire
from tests.support.blocks.plain import norms
from tests.support.blocks.steering import steered
from tests.support.command_lines import with_words
from tests.support.engine_process import EngineProcess, left_running, running_engine
from tracewire import Client, Output, Restarted
from tracewire_bus.bus import Bus
from tracewire_bus.mapped_files import SHARED, mapped_files
from tracewire_bus.owned_folder import OwnedFolder
from tracewire_bus.transport.embedded import EmbeddedServer

LENGTH = 200
PATIENCE = 300


@pytest.fixture
async def own_bus() -> AsyncIterator[str]:
    """A Redis of a test's own."""
    async with EmbeddedServer.start() as server:
        yield server.url


def victim(engine: EngineProcess, kind: str) -> psutil.Process:
    """The process of this kind: the adapter, vLLM's engine core, or one of its workers."""
    if kind == "adapter":
        (adapter,) = psutil.Process(engine.process.pid).children()
        return adapter
    (found, *_) = with_words(engine.descendants(), kind)
    return found


async def tokens_of(client: Client, trace: str) -> tuple[dict[int, list[int]], list[Any]]:
    """The tokens that each attempt of a trace put out, and all its events."""
    tokens: dict[int, list[int]] = {}
    events = [event async for event in client.subscribe(trace)]
    for event in events:
        if isinstance(event, Output):
            tokens.setdefault(event.attempt, []).extend(event.token_ids)
    return tokens, events


@pytest.mark.usefixtures("starts_engine")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("EngineCore", ("--bulk-threshold", "1"), id="engine core"),
        pytest.param("adapter", (), id="adapter", marks=pytest.mark.full),
        pytest.param("Worker", ("--tensor-parallel-size", "2"), id="worker of two", marks=pytest.mark.full),
    ],
)
async def test_a_killed_process_costs_an_attempt_and_nothing_else(
    own_bus: str, tmp_path: Path, kind: str, options: tuple[str, ...]
) -> None:
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if kind == "Worker" else {}
    shared = ("--drain", "0.1", "--bulk", str(tmp_path / "bulk"), "--log-format", "json")
    with running_engine(own_bus, tmp_path, *shared, *options, environment=environment) as engine:
        async with tracewire.connect(own_bus) as client, Bus.open(own_bus) as bus:
            model = await client.models.get("demo", timeout=PATIENCE)
            vector = np.random.default_rng(5).standard_normal(model.info.hidden_size).astype(np.float32)
            (before,) = await bus.registry.list()
            sampled = {"max_tokens": LENGTH, "ignore_eos": True}
            greedy = sampled | {"temperature": 0.0}
            async with (
                client.trace(
                    model, "def add(a, b):", steered(direction=vector), live={"alpha": 0.0}, **greedy
                ) as first,
                client.trace(model, "import os\n", temperature=1.0, **sampled) as second,
                client.trace(model, "import os\n", on_engine_loss="fail", temperature=1.0, **sampled) as third,
            ):
                for trace in (first, second, third):
                    async for item in trace:
                        if isinstance(item, Output) and item.index >= 10:
                            break
                assert await first.steer(alpha=3.0) == 1
                left = engine.descendants()
                victim(engine, kind).kill()
                with anyio.fail_after(PATIENCE):
                    results = [await first.result(), await second.result()]
                with pytest.raises(tracewire.TraceFailed) as lost:
                    await third.result()
            assert lost.value.type == "EngineLost"
            for trace, result in zip((first, second), results, strict=True):
                tokens, events = await tokens_of(client, trace.id)
                assert [event.attempt for event in events if isinstance(event, Restarted)] == [2]
                assert result.token_ids == tokens[2]
                assert len(tokens[2]) == LENGTH
                if trace is second:
                    # Sampled alike, though nobody named a seed.
                    assert tokens[1] == tokens[2][: len(tokens[1])]
                else:
                    # It begins with what it was steered to.
                    accepted = [event for event in events if isinstance(event, tracewire.Accepted)]
                    assert [one.live for one in accepted] == [{"alpha": 0.0}, {"alpha": 3.0}]
            (after,) = await bus.registry.list()
            assert after.engine != before.engine
            if "--bulk-threshold" in options:
                # What both engines saved lies beside Redis, and the second one looks after it.
                states = [await client.get_state(trace.id) for trace in (first, second)]
                assert [state.token_ids for state in states] == [result.token_ids for result in results]
                assert len(list((tmp_path / "bulk").glob("*/" + "[0-9a-f]" * 16))) >= 2
            # Nothing of the one before holds memory.
            _, alive = psutil.wait_procs(left, timeout=60)
            assert not alive
            trace = await left_running(client)
            below = engine.descendants()
            engine.process.send_signal(signal.SIGTERM)
            with pytest.raises(tracewire.TraceFailed, match="shut down"):
                await trace.result()
            await trace.aclose()
            status = await anyio.to_thread.run_sync(engine.process.wait)
            assert status == 0, engine.log.read_text()[-2000:]
            _, alive = psutil.wait_procs(below, timeout=30)
            assert not alive
            assert await client.models.list() == []
    lines = [json.loads(line) for line in engine.log.read_text().splitlines() if line.startswith("{")]
    assert all({"time", "level", "logger", "message", "pid"} <= line.keys() for line in lines)
    assert {line["logger"] for line in lines} >= {"tracewire"}
    assert len({line["pid"] for line in lines}) >= 3


@pytest.mark.full
@pytest.mark.usefixtures("starts_engine")
async def test_a_killed_save_relay_costs_an_attempt_and_the_engine_stays(own_bus: str, tmp_path: Path) -> None:
    """The process that passes on what blocks in hosts save."""
    with running_engine(own_bus, tmp_path, "--blocks", "host") as engine:
        async with tracewire.connect(own_bus) as client, Bus.open(own_bus) as bus:
            model = await client.models.get("demo", timeout=PATIENCE)
            (before,) = await bus.registry.list()
            sampled = {"max_tokens": LENGTH, "ignore_eos": True, "temperature": 0.0}
            for round_ in range(2):
                async with client.trace(model, "def add(a, b):", norms(), **sampled) as trace:
                    async for item in trace:
                        if isinstance(item, Output) and item.index >= 10:
                            break
                    (relay,) = [one for one in engine.descendants() if named(one) == "tw-saves"]
                    relay.kill()
                    with anyio.fail_after(PATIENCE):
                        result = await trace.result()
                _, events = await tokens_of(client, trace.id)
                assert [event.attempt for event in events if isinstance(event, Restarted)] == [2], round_
                assert len(result.saves["kept"]) == LENGTH
            (after,) = await bus.registry.list()
            assert after.engine == before.engine
    assert "the process that passes on what blocks save has ended" in engine.log.read_text()


def named(process: psutil.Process) -> str:
    """The name of a process, as the kernel has it."""
    with suppress(FileNotFoundError):
        return (Path("/proc") / str(process.pid) / "comm").read_text().strip()
    return ""


@pytest.mark.usefixtures("starts_engine")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="one worker", marks=pytest.mark.full),
        pytest.param(("--tensor-parallel-size", "2"), id="two workers", marks=pytest.mark.full),
        pytest.param(
            ("--sandbox",),
            id="sandboxed",
            marks=[
                pytest.mark.full,
                pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap"),
            ],
        ),
    ],
)
async def test_files_of_an_engine_of_which_nobody_is_left_go_with_the_next_start(
    own_bus: str, tmp_path: Path, options: tuple[str, ...]
) -> None:
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if "--tensor-parallel-size" in options else {}
    before = set(SHARED.iterdir())
    with running_engine(own_bus, tmp_path, *options, environment=environment) as engine:
        await anyio.to_thread.run_sync(engine.wait_ready)
        pids = [engine.process.pid, *(one.pid for one in engine.descendants())]
        mapped = mapped_files(pids)
        for pid in pids:
            # Some end with their parent.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await anyio.to_thread.run_sync(engine.process.wait)
        psutil.wait_procs(engine.below, timeout=60)
        left = {file for file in SHARED.iterdir() if (file.stat().st_dev, file.stat().st_ino) in mapped} - before
        assert {file.name.partition("_")[0] for file in left} >= {"psm"}
        # As the next engine's start does.
        with OwnedFolder("tracewire-memory-"), OwnedFolder("tracewire-link-"), OwnedFolder("tracewire-sandbox-"):
            assert not [file for file in left if file.exists()]
