"""A Redis that evicts is refused, and a full one takes no submission."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import tracewire
from tests.support.bus_engine import engine_info
from tests.support.redis.durable import Server, server
from tests.support.redis_loss import limit, played
from tests.support.scripted_engine import acts
from tracewire_bus import recovery
from tracewire_bus.bus import Bus, BusError
from tracewire_bus.events import restore


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
async def test_a_redis_that_evicts_is_refused(redis: Server) -> None:
    from tracewire_engine.launch.cli import _check_redis

    async with Bus.open(redis.url) as bus:
        await bus.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        await bus.memory.refuse_eviction()
        await limit(bus, "100mb")
        for _ in range(2):
            with pytest.raises(BusError, match="noeviction"):
                await bus.memory.refuse_eviction()
        with pytest.raises(BusError, match="allkeys-lru"):
            await _check_redis(redis.url, "tw", False)
        await bus.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
        await bus.memory.refuse_eviction()


@pytest.mark.usefixtures("_soon")
async def test_a_full_redis_takes_no_submission_and_says_so(redis: Server) -> None:
    async with played(redis.url) as (gate, client, bus, _):
        gate.open()
        trace = client.trace("tiny", "hello", acts, max_tokens=3, trace_id="t")
        # Redis takes and frees up to a MB for its connections: little beside this.
        await bus.command("SETRANGE", "ballast", 64 << 20, "x")
        await limit(bus, 1)
        with pytest.raises(tracewire.BusFull, match="--retention"):
            await trace.start()
        used = (await bus.memory.usage())[1]
        await limit(bus, int(used / 0.99))
        client._session.open_bus().memory._left.forget()
        with pytest.raises(tracewire.BusFull, match="left"):
            await trace.start()
        assert await bus.queue.waiting("tiny") == 0
        await limit(bus, 0)
        client._session.open_bus().memory._left.forget()
        await trace.start()
        assert len((await trace.result()).token_ids) == 3
        await trace.aclose()


async def test_an_engine_renews_its_entry_and_is_found_while_redis_is_full(redis: Server) -> None:
    """Nor does a full Redis count as one that was away, after which lost engines are looked for anew."""
    info = engine_info()
    async with Bus.open(redis.url, patience_s=0.5) as bus:
        await bus.registry.register(info)
        await bus.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
        await bus.command("CONFIG", "SET", "maxmemory", "1")
        broken_at = bus.broken_at
        await bus.registry.register(info)
        await bus.command("SREM", bus.keys.engines(), info.engine)
        await bus.registry.register(info)
        assert [one.engine for one in await bus.registry.list()] == [info.engine]
        with pytest.raises(BusError):
            await bus.command("SADD", bus.keys.engines(), "another")
        assert bus.broken_at == broken_at
        await bus.command("CONFIG", "SET", "maxmemory", "0")
