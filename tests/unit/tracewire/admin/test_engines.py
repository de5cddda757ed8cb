"""Engines are listed and drained, and what cannot be drained is refused with the reason."""

from __future__ import annotations

import pytest

import tracewire
from tests.support.bus_engine import engine_info
from tracewire import Client
from tracewire_bus.bus import Bus
from tracewire_bus.transport.embedded import EmbeddedServer
from tracewire_bus.wire.messages import Versions


async def test_what_cannot_be_drained_is_refused_with_the_reason(client: Client, bus: Bus) -> None:
    with pytest.raises(tracewire.UnknownEngine, match="no engine is registered at all"):
        await client.engines.drain("nobody")
    await bus.registry.register(engine_info("tiny", "early", schema="1.0"))
    with pytest.raises(tracewire.UnknownEngine, match="live now: early"):
        await client.engines.drain("nobody")
    with pytest.raises(tracewire.EngineTooOld, match="SIGTERM"):
        await client.engines.drain("early")
    for timeout in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout"):
            await client.engines.drain("early", timeout=timeout)


async def test_one_client_sees_the_engines_of_all_models(client: Client, bus: Bus) -> None:
    await bus.registry.register(engine_info("left", "l1", capacity=4, running=1, started_at=1.0, host="a"))
    await bus.registry.register(engine_info("left", "l2", capacity=6, started_at=2.0, state="draining"))
    await bus.registry.register(engine_info("right", "r1", versions=Versions(vllm="0.32.0")))
    assert [(one.name, one.capacity, one.running) for one in await client.models.list()] == [
        ("left", 10, 1),
        ("right", 16, 0),
    ]
    engines = await client.engines.list()
    assert [(one.name, one.model, one.state, one.ready) for one in engines] == [
        ("l1", "left", "serving", True),
        ("l2", "left", "draining", False),
        ("r1", "right", "serving", True),
    ]
    assert engines[0].host == "a"
    assert engines[2].versions["vllm"] == "0.32.0"
    assert [one.name for one in await client.engines.list(model="right")] == ["r1"]


async def test_the_memory_of_redis() -> None:
    async with EmbeddedServer.start() as server, Bus.open(server.url) as bus, tracewire.connect(server.url) as client:
        before = await client.engines.redis_memory()
        await bus._connections.command("SET", "filler", b"x" * 5_000_000)
        await bus._connections.command("CONFIG", "SET", "maxmemory", "512mb")
        after = await client.engines.redis_memory()
    assert after.used - before.used > 4_000_000
    assert after.limit == 512 * 1024 * 1024
