"""The registry passes over what it cannot read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.support.bus_engine import engine_info
from tests.support.redis.proxy import proxy
from tests.support.served import ENGINE, served
from tests.support.until import until
from tracewire_bus.bus import Bus, BusUnavailable
from tracewire_bus.wire.codec import decode_engine, encode
from tracewire_bus.wire.messages import EngineInfo, ModuleInfo


async def test_what_engines_register_is_passed_over_where_it_is_malformed(bus: Bus, embedded: str, prefix: str) -> None:
    async with served(bus, embedded, prefix) as (_, client):
        await bus.command("SADD", bus.keys.engines(), b"\xff", "other")
        await bus.command("SET", bus.keys.heartbeat("other"), b"\xc1")
        assert [engine.name for engine in await client.engines.list()] == [ENGINE]


async def test_engines_are_listed_while_they_live(bus: Bus) -> None:
    infos = [
        EngineInfo(engine=name, model=model, started_at=started)
        for name, model, started in [("z", "a", 1.0), ("y", "a", 2.0), ("x", "b", 0.0)]
    ]
    for info in reversed(infos):
        await bus.registry.register(info)
    assert await bus.registry.list() == infos
    infos[0].running = 3
    await bus.registry.register(infos[0])
    assert await bus.registry.list() == infos
    await bus.registry.unregister("y")
    assert [info.engine for info in await bus.registry.list()] == ["z", "x"]


async def test_an_engine_s_limits_hold_before_clients_find_it(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    connections = bus.registry._connections
    commands = connections.commands
    limited: list[bool] = []

    async def noted(*sent: Any, **options: Any) -> Any:
        if any(bus.keys.engine("e") in str(one) for one in sent):
            limited.append(await bus.command("HGET", bus.keys.queue("m", "state"), "bytes") == b"1000")
        return await commands(*sent, **options)

    monkeypatch.setattr(connections, "commands", noted)
    await bus.registry.register(EngineInfo(engine="e", model="m", limits={"submission_bytes": 1000}))
    assert limited == [True]


async def test_an_engine_without_a_heartbeat_expires_and_may_come_back(bus: Bus) -> None:
    gone, alive = EngineInfo(engine="gone", model="m"), EngineInfo(engine="alive", model="m")
    await bus.registry.register(alive)
    await bus.registry.register(gone, ttl_s=0.05)

    async def only_alive() -> bool:
        return await bus.registry.list() == [alive]

    await until(only_alive)
    assert await bus.command("SMEMBERS", bus.keys.engines()) == [b"alive"]
    await bus.registry.register(gone)
    assert len(await bus.registry.list()) == 2


async def test_a_heartbeat_carries_no_tree_and_a_tree_is_read_once(bus: Bus, embedded: str, prefix: str) -> None:
    modules = [ModuleInfo(f"m.{number}", "M") for number in range(1000)]
    tree: dict[str, Any] = {"modules": modules, "attributes": {"M": ["weight"]}, "sources": {"M": "def forward" * 1000}}
    infos = [EngineInfo(engine=f"e{number}", model="m", started_at=float(number), **tree) for number in range(5)]
    async with Bus.open(embedded, prefix=prefix) as reader:

        async def read_and_written(action: Callable[[], Awaitable[Any]]) -> tuple[int, int]:
            before = await _network(bus)
            await action()
            after = await _network(bus)
            return after[1] - before[1], after[0] - before[0]

        async def beat() -> None:
            for info in infos:
                info.running += 1
                await bus.registry.register(info)

        _, first = await read_and_written(beat)
        _, again = await read_and_written(beat)
        size = len(encode(infos[0]))
        assert first > 5 * size
        assert again < size
        looked, _ = await read_and_written(reader.registry.list)
        assert size < looked < 2 * size
        looked, _ = await read_and_written(reader.registry.list)
        assert looked < size
        assert await reader.registry.list() == infos

        # What earlier versions read is renewed as well, and written anew when more than a number changes.
        assert decode_engine(await bus.command("GET", bus.keys.engine("e0"))).running == 1
        infos[0].state = "draining"
        await bus.registry.register(infos[0])
        assert decode_engine(await bus.command("GET", bus.keys.engine("e0"))) == infos[0]
        # A Redis that has lost it is told everything.
        await bus.command("DEL", *(bus.keys.engine(info.engine) for info in infos), bus.keys.heartbeat("e1"))
        await beat()
        assert await reader.registry.list() == infos
        assert decode_engine(await bus.command("GET", bus.keys.engine("e1"))) == infos[1]

        # The tree that one engine no longer has is read from another, and one that changes under a name anew.
        await bus.registry.unregister("e0")
        infos[1].modules = [ModuleInfo("n", "N")]
        await bus.registry.register(infos[1])
        assert await reader.registry.list() == infos[1:]


async def _network(bus: Bus) -> tuple[int, int]:
    """Bytes that Redis has read from and written to the network."""
    stats = bytes(await bus.command("INFO", "stats")).decode()
    lines = dict(line.split(":", 1) for line in stats.splitlines() if ":" in line)
    return int(lines["total_net_input_bytes"]), int(lines["total_net_output_bytes"])


async def test_an_engine_of_an_earlier_version_is_listed_too(bus: Bus) -> None:
    early, late = EngineInfo(engine="early", model="m"), EngineInfo(engine="late", model="m", started_at=1.0)
    await bus.command("SET", bus.keys.engine("early"), encode(early))
    await bus.command("SADD", bus.keys.engines(), "early")
    await bus.registry.register(late)
    assert await bus.registry.list() == [early, late]
    assert await bus.registry.alive("early", "late") == {"early", "late"}


async def test_an_engine_that_nobody_understands_is_left_out(bus: Bus) -> None:
    await bus.command("SADD", bus.keys.engines(), "strange")
    await bus.command("SET", bus.keys.engine("strange"), b"\xc1")
    await bus.registry.register(EngineInfo(engine="e", model="m"))
    assert [info.engine for info in await bus.registry.list()] == ["e"]


async def test_an_engine_registers_over_a_link_of_its_own_and_tries_once(
    embedded: str, prefix: str, bus: Bus, tmp_path: Path
) -> None:
    info = engine_info()
    async with proxy(embedded, tmp_path) as way, Bus.open(way.url, prefix=prefix, patience_s=1000) as other:
        link = other.link()
        for _ in range(2):
            await other.registry.register(info, 60, link)
        assert [one.engine for one in await bus.registry.list()] == [info.engine]
        way.away = True
        await way.cut()
        before = other.broken_at
        with anyio.fail_after(60), pytest.raises(BusUnavailable):
            await other.registry.register(info, 60, link)
        assert other.broken_at > before
        way.away = False
        await other.registry.register(info, 60, link)
        await link.drop()
