"""Readers of the firehose that die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import anyio

import tracewire
from tests.faults.test_engine_loss import PATIENCE, Gate, free
from tests.support.scripted_engine import ScriptedEngine, acts, serving
from tracewire_bus.bus import Bus

MEMBER = """
import asyncio, sys, tracewire

async def main(url, prefix, name, idle):
    async with tracewire.connect(url, prefix=prefix) as client:
        async with client.watch(group="g", consumer=name, since="start", idle_timeout=float(idle)) as watch:
            print("ready", flush=True)
            count = 0
            async for event in watch:
                print(event.trace_id, event.type, flush=True)
                count += 1
                if count == 3:
                    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_what_a_killed_member_had_goes_to_another(bus: Bus, embedded: str, prefix: str) -> None:
    """Each event is handled by somebody, and twice only what was in the killed one's hands."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    async with tracewire.connect(embedded, prefix=prefix) as client, serving(bus, free()):
        await client.models.get("tiny", timeout=PATIENCE)
        wanted = set()
        for _ in range(30):
            async with client.trace("tiny", "hello", acts, max_tokens=2) as trace:
                await trace.result()
            wanted |= {(trace.id, kind) for kind in ("queued", "accepted", "final")}
        doomed = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", MEMBER, embedded, prefix, "doomed", "0.2"),
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert doomed.stdout is not None
        with anyio.fail_after(60):
            assert await doomed.stdout.readline() == b"ready\n"
            # It has read many at once, and handles them one by one.
            first = [(await doomed.stdout.readline()).decode().split() for _ in range(3)]
            doomed.send_signal(signal.SIGKILL)
            await doomed.wait()
        handled = {(trace, kind) for trace, kind in first}
        again = 0
        async with client.watch(group="g", consumer="heir", idle_timeout=0.2) as watch:
            with anyio.fail_after(60):
                while handled != wanted:
                    event = await anext(watch)
                    again += (event.trace_id, event.type) in handled
                    handled.add((event.trace_id, event.type))
        # The one that it had not asked past.
        assert again == 1


async def test_a_watch_tells_of_a_trace_whose_engine_died(bus: Bus, embedded: str, prefix: str) -> None:
    gate = Gate()
    async with (
        tracewire.connect(embedded, prefix=prefix) as client,
        client.watch() as watch,
        serving(bus, dying := ScriptedEngine(gate)) as first,
    ):
        await client.models.get("tiny", timeout=PATIENCE)
        async with client.trace("tiny", "hello", acts, max_tokens=20, detach=True) as trace:
            await trace.accepted()
            await trace.pause()
            with anyio.fail_after(PATIENCE):
                kinds = [(await anext(watch)).type for _ in range(3)]
            await trace.resume()
            gate.step(3)
            with anyio.fail_after(PATIENCE):
                kinds.append((await anext(watch)).type)
            dying.die()
            await first.ended.wait()
            async with serving(bus, free()):
                with anyio.fail_after(PATIENCE):
                    await trace.result()
                    events = [await anext(watch) for _ in range(3)]
    assert kinds == ["queued", "accepted", "paused", "resumed"]
    assert [(event.type, event.attempt) for event in events] == [("restarted", 2), ("accepted", 2), ("final", 2)]
    assert (events[-1].status, events[-1].tokens, events[-1].prompt_tokens) == ("finished", 20, 1)
