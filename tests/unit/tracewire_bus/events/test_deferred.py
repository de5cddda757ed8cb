"""What Redis refused for want of memory comes in order."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from tests.support.redis.durable import Server, server
from tests.support.redis_loss import limit
from tests.support.until import until
from tracewire_bus import recovery
from tracewire_bus.bus import Bus
from tracewire_bus.events import restore
from tracewire_bus.wire.ids import FINAL_ID

PATIENCE = 60


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
async def test_what_was_refused_together_comes_in_order(redis: Server) -> None:
    """Several events of one trace in one round trip, to a Redis that is full."""
    async with Bus.open(redis.url) as bus, bus.writer(memory_patience_s=1000) as writer:
        await writer.append("t", 1, 0, b"begun")
        await limit(bus, 1)
        async with anyio.create_task_group() as group:
            for seq in range(1, 6):
                group.start_soon(writer.append, "t", 1, seq, b"more")
            await until(lambda: [len(stream.stuck) for stream in writer._stuck.streams.values()] == [5])
            await limit(bus, 0)
            with anyio.fail_after(PATIENCE):
                await writer.append("t", 1, 6, b"the end", final=True)
        found = [id_ for id_, _ in await bus.command("XRANGE", bus.keys.events("t"), "-", "+")]
    assert found == [*(b"1-%d" % seq for seq in range(6)), FINAL_ID.encode()]


@pytest.mark.usefixtures("_soon")
async def test_nothing_overtakes_what_was_refused(redis: Server) -> None:
    """Memory comes and goes while many events of the same traces are under way at once."""
    count = 300
    async with Bus.open(redis.url) as bus, bus.writer(memory_patience_s=1000) as writer:
        done = False

        async def toggle() -> None:
            full = False
            while not done:
                full = not full
                await limit(bus, int(full))
                await anyio.sleep(0.002)
            await limit(bus, 0)

        async def write(trace: str) -> None:
            async with anyio.create_task_group() as group:
                for seq in range(count):
                    data = b"x" * (100_000 if seq % 50 == 7 else 10)
                    group.start_soon(writer.append, trace, 1, seq, data)
            await writer.append(trace, 1, count, b"the end", final=True)

        async with anyio.create_task_group() as group:
            group.start_soon(toggle)
            with anyio.fail_after(PATIENCE):
                async with anyio.create_task_group() as traces:
                    for one in range(3):
                        traces.start_soon(write, f"t{one}")
            done = True
        for one in range(3):
            found = [id_ for id_, _ in await bus.command("XRANGE", bus.keys.events(f"t{one}"), "-", "+")]
            assert found == [*(b"1-%d" % seq for seq in range(count)), FINAL_ID.encode()]
        assert writer.backlog == 0
