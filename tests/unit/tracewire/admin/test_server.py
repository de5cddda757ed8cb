"""Redis is asked about itself."""

from __future__ import annotations

import pytest

import tracewire
from tracewire import BusRefused, Client
from tracewire_bus.bus import Bus


async def test_redis_says_how_it_is_set_up(client: Client, bus: Bus) -> None:
    info = await client.server.info()
    assert (await bus.command("INFO", "server")).decode().split("redis_version:")[1].startswith(info.version)
    assert (info.mode, info.eviction_policy, info.memory_limit, info.appendonly) == (
        "standalone",
        "noeviction",
        0,
        False,
    )
    assert info.memory_used > 0
    assert info.clients > 0
    # Both clocks are this machine's.
    assert abs(info.clock_offset_s) <= info.round_trip_s + 0.001


async def test_a_user_that_may_not_ask_is_told(bus: Bus, embedded: str) -> None:
    await bus.command("ACL", "SETUSER", "blind", "on", ">secret", "~*", "&*", "+@all", "-info")
    try:
        async with tracewire.connect(f"{embedded}?username=blind&password=secret") as client:
            with pytest.raises(BusRefused):
                await client.server.info()
    finally:
        await bus.command("ACL", "DELUSER", "blind")
