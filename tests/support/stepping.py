"""Scripted engines that step as a test says, and what their traces must come to."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import anyio

from tests.support.scripted_engine import ScriptedEngine, expected
from tracewire import Client, Final, Output

PATIENCE = 60


class Gate:
    """Lets an engine step as often as a test says."""

    def __init__(self) -> None:
        self._steps = asyncio.Semaphore(0)
        self._open = False

    async def __call__(self) -> None:
        """Wait for the next step."""
        if self._open:
            await anyio.lowlevel.checkpoint()
        else:
            await self._steps.acquire()

    def step(self, count: int = 1) -> None:
        """Let it make some steps."""
        for _ in range(count):
            self._steps.release()

    def open(self) -> None:
        """Let it run."""
        self._open = True
        self._steps.release()


def free() -> ScriptedEngine:
    """An engine that runs as fast as it can."""
    return ScriptedEngine(partial(anyio.sleep, 0))


async def whole(client: Client, trace: str, prompt: str, tokens: int, **more: Any) -> list[Any]:
    """All events of a trace that finished, and whose last attempt has all that it should have."""
    with anyio.fail_after(PATIENCE):
        events = [event async for event in client.subscribe(trace)]
    assert [type(event) for event in events].count(Final) == 1
    assert isinstance(events[-1], Final)
    assert events[-1].status == "finished", events[-1]
    state = await client.get_state(trace)
    ids, saved = expected(prompt, tokens, **more)
    assert state.token_ids == ids
    assert [list(map(float, array)) for array in state.saves["acts"]] == saved
    return events


async def some(trace: Any, tokens: int) -> None:
    """Read so many tokens of it."""
    async for item in trace:
        if isinstance(item, Output):
            tokens -= len(item.token_ids)
            if tokens <= 0:
                return
