"""Engines that are asked to leave, and the command that asks them."""

# ruff: noqa: ASYNC110

# ruff: noqa: ASYNC110
from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

import tracewire
from tests.support.scripted_engine import ScriptedEngine, acts, expected, info, serving
from tests.support.stepping import free
from tracewire import Client, Final, Output
from tracewire.cli import main as cli
from tracewire_bus.bus import Bus

PATIENCE = 60


async def run_command(*arguments: str) -> int:
    """Run the run_command as a program would, with an event loop of its own."""
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


@tracewire.intervention
def reads_norm(model, tracer, live):
    for step in tracer.iter[:]:
        norm = model.model.norm.output[-1].save()
