"""What the adapter and the client do where an engine's call fails, Redis is away, or a caller passes odd values."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import tracewire
from tests.bus.proxy import proxy
from tests.control.adapted import PlayedEngine, adapted
from tests.scripted import engine_info
from tracewire import Client, Final
from tracewire_bus.live import live_values
from tracewire_bus.streams import Bus

PATIENCE = 30


@pytest.fixture
async def client(embedded: str, prefix: str, bus: Bus) -> AsyncIterator[Client]:
    """A client, of a bus on which a model is known."""
    await bus.register(engine_info(), ttl_s=600)
    async with tracewire.connect(embedded, prefix=prefix, client="one") as client:
        yield client


async def test_a_change_that_names_nobody_readable_ends_no_trace(
    client: Client, bus: Bus, embedded: str, prefix: str
) -> None:
    """Whoever wrote it (another client, say): the trace gets its final."""
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with (
            adapted(embedded, prefix, engine),
            client.trace("tiny", "hello", live={"alpha": 0.0}, detach=True) as trace,
        ):
            await trace.accepted()
            await bus.records.steer(trace.id, live_values({"alpha": 1.0}), by=5)  # type: ignore[arg-type]
            assert await trace.steer(alpha=2.0) == 2
            (request,) = engine.requests
            engine.finish(request)
            assert (await trace.result()).text == "x"
        with pytest.raises(tracewire.SteerRejected) as caught:
            await client.steer(trace.id, alpha=1.0, by=5)  # type: ignore[arg-type]
        assert caught.value.field == "by"


@pytest.mark.parametrize("deadline", [1e14, 1e20, 1e300])
async def test_a_deadline_may_be_as_far_as_one_likes(
    client: Client, embedded: str, prefix: str, deadline: float
) -> None:
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with client.trace("tiny", "hello", deadline=deadline, detach=True) as trace:
            async with adapted(embedded, prefix, engine):
                await trace.accepted()
                (request,) = engine.requests
                engine.finish(request)
                events = [event async for event in client.subscribe(trace.id)]
                assert isinstance(events[-1], Final)
                assert events[-1].status == "finished"


async def test_an_entry_waits_for_a_redis_that_is_away_while_it_is_opened(
    client: Client, embedded: str, prefix: str, tmp_path: Path
) -> None:
    """For longer than the bus is patient."""
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with proxy(embedded, tmp_path) as way, adapted(way.url, prefix, engine) as adapter:
            records, opening = adapter._bus.records, anyio.Event()
            plain = records.open

            async def opened(trace: str, name: str) -> Any:
                way.away = True
                await way.cut()
                try:
                    return await plain(trace, name)
                finally:
                    way.away = False
                    opening.set()
                    records.open = plain  # type: ignore[method-assign]

            records.open = opened  # type: ignore[method-assign]
            async with client.trace("tiny", "hello", detach=True) as trace:
                await opening.wait()
                await trace.accepted()
                (request,) = engine.requests
                engine.finish(request)
                assert (await trace.result()).text == "x"
