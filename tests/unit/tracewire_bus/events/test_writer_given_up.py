"""What a writer has given up is numbered anew."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.redis.durable import Server, server
from tests.support.redis_loss import limit
from tests.support.until import until
from tracewire_bus import recovery
from tracewire_bus.bus import Bus
from tracewire_bus.events import restore
from tracewire_bus.transport.errors import BusFull, NotAllowed


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a while waits less."""
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.1)
    monkeypatch.setattr(restore, "CHECK_S", 0.05)
    monkeypatch.setattr("tracewire.traces.presence.GUARD_POLL_S", 0.05)


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[Server]:
    """A server with a log that is on the disk every second."""
    async with server(tmp_path / "redis") as one:
        yield one


@pytest.mark.usefixtures("_soon")
async def test_what_was_given_up_is_numbered_anew(redis: Server) -> None:
    async with Bus.open(redis.url) as bus, bus.writer(memory_patience_s=0.05) as writer:
        await writer.append("t", 1, 0, b"begun")
        await writer.append("t", 1, 1, b"one")
        await limit(bus, 1)
        refused = [writer.submit("t", 1, seq, b"more") for seq in (2, 3)]
        for one in refused:
            with pytest.raises(BusFull):
                await one
        with pytest.raises(BusFull):
            await writer.append("t", 1, 4, b"too early", final=True)
        assert writer.resume("t", 1) == 1
        assert writer.resume("t", 2) == writer.resume("u", 1) == -1
        await writer.append("t", 1, 2, b"the end", final=True)
        assert writer.backlog == 0


@pytest.mark.usefixtures("_soon")
async def test_a_final_that_is_refused_after_a_rest_keeps_the_place_of_the_next_one(
    redis: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer has dropped the acknowledged events by then."""
    monkeypatch.setattr(restore, "KEEP_S", 0.0)
    async with Bus.open(redis.url) as bus, bus.writer() as writer:
        await writer.append("t", 1, 0, b"begun")
        await writer.append("t", 1, 1, b"one")
        await until(lambda: not writer.restorer._kept)
        await redis.ask("ACL", "SETUSER", "default", "-eval")
        with pytest.raises(NotAllowed):
            await writer.append("t", 1, 2, b"the end", final=True)
        assert writer.resume("t", 1) == 1
        await redis.ask("ACL", "SETUSER", "default", "+eval")
        await writer.append("t", 1, 2, b"the end", final=True)
        writer.forget("t")
        await until(lambda: not writer.restorer.streams)
