"""Streams that are trimmed while they are read: who falls behind, or comes late, or dies, has everything in the end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial

import anyio
import pytest

import tracewire
from tests.support.scripted_engine import ScriptedEngine, acts, expected, info, serving
from tests.support.stepping import PATIENCE, Gate, free
from tests.support.until import until
from tracewire import Accepted, Client, Final, Gap, Output, Restarted
from tracewire_bus import recovery
from tracewire_bus.bus import Bus


@pytest.fixture
async def client(embedded: str, prefix: str) -> AsyncIterator[Client]:
    """A client on the session's Redis."""
    async with tracewire.connect(embedded, prefix=prefix) as client:
        yield client


async def holds(client: Client, trace: str, prompt: str, tokens: int) -> None:
    """Its state is what it should be, whatever is left of its stream."""
    state = await client.get_state(trace)
    ids, saved = expected(prompt, tokens)
    assert state.token_ids == ids
    assert [list(map(float, array)) for array in state.saves["acts"]] == saved
    assert state.status == "finished"


async def snapshots(bus: Bus, trace: str) -> int:
    """At which event the snapshot of a trace is; -1 without one."""
    return int(await bus.command("HGET", bus.keys.snapshot(trace), "s") or -1)


@pytest.mark.parametrize("setting", [{"retain_events": 20}, {"retain_bytes": 2000}])
async def test_a_stream_stays_small_and_every_reader_has_everything(
    client: Client, bus: Bus, setting: dict[str, int]
) -> None:
    """One that reads as it comes, one that sleeps until the end, one that comes then, and the trace's own handle."""
    gate = Gate()
    async with serving(bus, ScriptedEngine(gate), **setting):
        await client.models.get("tiny", timeout=PATIENCE)
        asleep = client.subscribe("t")
        async with client.trace("tiny", "hello", acts, max_tokens=400, trace_id="t", detach=True) as trace:
            most = 0
            for count in range(1, 401):
                gate.step()
                if count < 400:
                    await until(lambda count=count: _reached(bus, "t", count))
                if count == 3:
                    assert isinstance(await anext(asleep), Accepted)
                most = max(most, await bus.command("XLEN", bus.keys.events("t")))
            with anyio.fail_after(PATIENCE):
                result = await trace.result()
        assert result.token_ids == expected("hello", 400)[0]
        assert [list(map(float, array)) for array in result.saves["acts"]] == expected("hello", 400)[1]
        # A quarter of what the state takes, at most.
        assert most < 200
        await holds(client, "t", "hello", 400)
        events = [event async for event in asleep]
        gaps = [event for event in events if isinstance(event, Gap)]
        assert len(gaps) == 1
        at = events.index(gaps[0])
        assert [event.id for event in events[:at]][-1:] in ([gaps[0].since], [])
        tokens = [token for event in events[at + 1 :] if isinstance(event, Output) for token in event.token_ids]
        assert gaps[0].state.token_ids + tokens == result.token_ids
        assert isinstance(events[-1], Final)
        late = [event async for event in client.subscribe("t", names=())]
        assert isinstance(late[0], Gap)
        assert late[0].since == "start"
        assert late[0].state.saves == {}
        assert (await client.get_state("t")).accepted is not None
        async with client.trace("tiny", "hello", acts, max_tokens=400, trace_id="t", detach=True) as again:
            assert isinstance(await anext(again), Gap)
            assert (await again.accepted()).model == "tiny"
            assert (await again.result()).digest() == result.digest()


async def _reached(bus: Bus, trace: str, seq: int) -> bool:
    return bool(await bus.tail_id(trace) >= "1-" and int((await bus.tail_id(trace)).partition("-")[2]) >= seq)


async def test_a_consumer_that_sleeps_while_its_stream_is_trimmed_under_it(client: Client, bus: Bus) -> None:
    """Its buffer is full and let go; what it reads next is gone."""
    async with serving(bus, free(), retain_events=50):
        await client.models.get("tiny", timeout=PATIENCE)
        async with client.trace("tiny", "hello", acts, max_tokens=3000, trace_id="t", detach=True) as trace:
            asleep = client.subscribe("t")
            await anext(asleep)
            await until(lambda: bus.records.ended("t"))
            with anyio.fail_after(PATIENCE):
                result = await trace.result()
                events = [event async for event in asleep]
        assert result.token_ids == expected("hello", 3000)[0]
        told = 0
        for event in events:
            if isinstance(event, Gap):
                told = len(event.state.token_ids)
            elif isinstance(event, Output):
                assert event.index == told
                told += len(event.token_ids)
        assert told == 3000


async def test_a_trace_that_was_trimmed_and_loses_its_engine(
    client: Client, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.1)
    gate = Gate()
    async with serving(bus, dying := ScriptedEngine(gate), retain_events=5) as first:
        await client.models.get("tiny", timeout=PATIENCE)
        trace = client.trace("tiny", "hello", acts, max_tokens=60, detach=True)
        await trace.start()
        for count in range(1, 31):
            gate.step()
            await until(lambda count=count: _reached(bus, trace.id, count))
        await until(lambda: _trimmed(bus, trace.id, 1))
        dying.die()
        await first.ended.wait()
        last = (await client.get_state(trace.id)).position
        async with serving(bus, free(), retain_events=5):
            with anyio.fail_after(PATIENCE):
                result = await trace.result()
        assert result.token_ids == expected("hello", 60)[0]
        await holds(client, trace.id, "hello", 60)
        seen = [event async for event in client.subscribe(trace.id, since=last)]
        assert isinstance(seen[0], Gap | Restarted)
        await trace.aclose()


async def _trimmed(bus: Bus, trace: str, seq: int) -> bool:
    return await snapshots(bus, trace) >= seq


async def test_without_a_limit_nothing_is_trimmed(client: Client, bus: Bus) -> None:
    async with serving(bus, free()):
        await client.models.get("tiny", timeout=PATIENCE)
        async with client.trace("tiny", "hello", acts, max_tokens=200) as trace:
            await trace.result()
        assert [type(event) for event in [event async for event in client.subscribe(trace.id)]].count(Gap) == 0
        assert await snapshots(bus, trace.id) == -1


async def test_a_snapshot_that_redis_refuses_hurts_no_trace(
    client: Client, bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    async with serving(bus, ScriptedEngine(gate), retain_events=5):
        await client.models.get("tiny", timeout=PATIENCE)
        await bus.command("SET", bus.keys.snapshot("t"), "no hash")
        async with client.trace("tiny", "hello", acts, max_tokens=100, trace_id="t") as trace:
            gate.open()
            with anyio.fail_after(PATIENCE):
                assert len((await trace.result()).token_ids) == 100


CONSUMER = """
import asyncio, sys, tracewire
from tracewire_bus.domain.fold import Fold

async def main(url, prefix, trace, since):
    async with tracewire.connect(url, prefix=prefix) as client:
        async for event in client.subscribe(trace, since=since):
            if isinstance(event, tracewire.Gap):
                print("gap", event.since, event.until, *event.state.token_ids, flush=True)
            elif isinstance(event, tracewire.Output):
                print("output", event.id, *event.token_ids, flush=True)
            elif isinstance(event, tracewire.Final):
                print("final", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_consumer_is_killed_and_another_process_goes_on_from_its_last_id(
    client: Client, bus: Bus, embedded: str, prefix: str
) -> None:
    gate = Gate()

    async def start(since: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CONSUMER, embedded, prefix, "t", since),
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )

    async with serving(bus, ScriptedEngine(gate), info(), retain_events=20):
        await client.models.get("tiny", timeout=PATIENCE)
        async with client.trace("tiny", "hello", acts, max_tokens=200, trace_id="t") as trace:
            first = await start("start")
            assert first.stdout is not None
            tokens: list[int] = []
            last = ""
            for count in range(1, 11):
                gate.step()
                await until(partial(_reached, bus, "t", count))
            with anyio.fail_after(30):
                while len(tokens) < 10:
                    kind, last, *found = (await first.stdout.readline()).decode().split()
                    assert kind == "output"
                    tokens += map(int, found)
            first.send_signal(signal.SIGKILL)
            await first.wait()
            for count in range(11, 151):
                gate.step()
                await until(partial(_reached, bus, "t", count))
            await until(partial(_trimmed, bus, "t", 20))
            second = await start(last)
            gate.open()
            with anyio.fail_after(30):
                said, _ = await second.communicate()
            result = await trace.result()
    for line in said.decode().splitlines():
        kind, *rest = line.split()
        if kind == "gap":
            assert rest[0] == last
            tokens = list(map(int, rest[2:]))
        elif kind == "output":
            tokens += map(int, rest[1:])
    assert "gap" in said.decode()
    assert said.decode().endswith("final\n")
    assert tokens == result.token_ids == expected("hello", 200)[0]
