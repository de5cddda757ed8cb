"""The registry passes over what it cannot read."""

from __future__ import annotations

from tests.support.served import ENGINE, served
from tracewire_bus.bus import Bus


async def test_what_engines_register_is_passed_over_where_it_is_malformed(bus: Bus, embedded: str, prefix: str) -> None:
    async with served(bus, embedded, prefix) as (_, client):
        await bus.command("SADD", bus.keys.engines(), b"\xff", "other")
        await bus.command("SET", bus.keys.heartbeat("other"), b"\xc1")
        assert [engine.name for engine in await client.engines.list()] == [ENGINE]
