"""The blocking client records, runs again and forks, as the async one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread

import tracewire
from tests.support.bus_engine import Stage
from tracewire import Client

PATIENCE = 60


async def script(stage: Stage) -> None:
    await stage.accept()
    for _ in range(3):
        await stage.output("x")
    await stage.final()


async def test_the_blocking_forms(client: Client, engine: Callable[..., Any], prefix: str) -> None:
    def work() -> tuple[bool, list[int], list[int]]:
        with (
            tracewire.blocking.Client(client.url, prefix=prefix) as own,
            own.trace("tiny", "x", live={"a": 0.0}) as trace,
        ):
            trace.until_done()
            recording = trace.record()
            with trace.fork([{"a": 1.0}, {"a": 2.0}], at=1) as fan:
                forked = [step.index for step in fan]
            with own.fork(recording, [{}], at=2) as fan:
                again = [step.index for step in fan]
            return own.replay(recording).same, forked, again

    with anyio.fail_after(PATIENCE):
        async with engine(script, schema="2.5"):
            assert await anyio.to_thread.run_sync(work) == (True, [1, 2], [2])
