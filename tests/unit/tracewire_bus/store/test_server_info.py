"""What Redis says about itself is read from its answers."""

from __future__ import annotations

from tracewire_bus.bus import Bus
from tracewire_bus.store.server_info import ask_server


async def test_settings_are_read(bus: Bus) -> None:
    await bus.command("CONFIG", "SET", "maxmemory", "123mb")
    await bus.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    try:
        info = await ask_server(bus.command)
    finally:
        await bus.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
        await bus.command("CONFIG", "SET", "maxmemory", "0")
    assert (info.memory_limit, info.eviction_policy) == (123 << 20, "allkeys-lru")


async def test_the_clock_is_compared_at_the_middle_of_the_round_trip() -> None:
    """A server of an older Redis, whose clock is an hour ahead."""

    async def command(*words: str) -> object:
        if words == ("TIME",):
            import time

            seconds = time.time() + 3600
            return [b"%d" % int(seconds), b"%d" % int(seconds % 1 * 1e6)]
        return b"# Server\r\nredis_version:5.0.7\r\naof_enabled:1\r\n"

    info = await ask_server(command)
    assert abs(info.clock_offset_s - 3600) <= info.round_trip_s + 0.001
    assert (info.version, info.appendonly, info.memory_limit, info.mode) == ("5.0.7", True, 0, "")
