"""An adapter gives back what it claimed too late."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from tests.support.played_engine import PlayedEngine, adapted
from tracewire import Client, Final
from tracewire_bus.bus import Bus

PATIENCE = 60


@pytest.mark.usefixtures("registered")
async def test_what_is_claimed_too_late_is_given_back(client: Client, bus: Bus, embedded: str, prefix: str) -> None:
    """Redis comes back, and hears that a trace runs here when it has ended, or is another engine's, already."""
    engine = PlayedEngine()

    async def entries() -> tuple[int, int]:
        """How many entries the queue has, and how many of them are taken."""
        keys = [bus.keys.queue("tiny", part) for part in ("entries", "taken")]
        counts = [int(await bus.command("HLEN", key)) for key in keys]
        return counts[0], counts[1]

    with anyio.fail_after(PATIENCE):
        async with (
            adapted(embedded, prefix, engine) as adapter,
            client.trace("tiny", "hello", detach=True) as trace,
        ):
            await trace.accepted()
            late = adapter._claims.commands()
            engine.finish(next(iter(engine.requests)))
            await trace.result()
            while await entries() != (0, 0):
                await anyio.lowlevel.checkpoint()
            for command in late:
                await bus.command(*command)
            assert await entries() == (1, 1)
            adapter._claims.acknowledged()
            # Within two heartbeats it is put back, taken, and found to have ended.
            while await entries() != (0, 0):
                await anyio.lowlevel.checkpoint()
            assert len(engine.requests) == 1
            events = [event async for event in client.subscribe(trace.id)]
            assert [isinstance(event, Final) for event in events] == [False] * (len(events) - 1) + [True]
