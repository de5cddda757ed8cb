"""Scripts run wherever commands do, and are loaded when Redis does not know them."""

from __future__ import annotations

import uuid

import pytest

from tracewire_bus.scripts import Script
from tracewire_bus.streams import Bus, BusError


def unknown(text: str) -> Script:
    """A script that no Redis knows."""
    return Script(f"{text} -- {uuid.uuid4()}")


async def known(bus: Bus, script: Script) -> bool:
    return bool((await bus.command("SCRIPT", "EXISTS", script.digest))[0])


async def test_a_script_is_loaded_when_it_is_not_known(bus: Bus) -> None:
    script = unknown("return {KEYS[1], ARGV[1], ARGV[2]}")
    assert not await known(bus, script)
    for _ in range(2):
        assert await bus.command(*script(["{k}"], b"\xff", 3)) == [b"{k}", b"\xff", b"3"]
        assert await known(bus, script)


async def test_scripts_stand_between_other_commands(bus: Bus) -> None:
    key = bus.keys.dead()
    first, second = (unknown(f"return redis.call('RPUSH', KEYS[1], {number})") for number in (1, 2))
    replies = await bus._connections.commands(
        ("RPUSH", key, 0), first([key]), ("ECHO", "between"), second([key]), ("ECHO", "last")
    )
    assert replies == [1, 2, b"between", 3, b"last"]
    assert await bus.command("LRANGE", key, 0, -1) == [b"0", b"1", b"2"]


async def test_what_a_script_raises_is_said(bus: Bus) -> None:
    for _ in range(2):
        with pytest.raises(BusError, match="so it is"):
            await bus.command(*unknown("return redis.error_reply('so it is')")([]))


async def test_a_digest_that_is_nobodys_is_an_error(bus: Bus) -> None:
    with pytest.raises(BusError, match="No matching script"):
        await bus.command("EVALSHA", "0" * 40, 0)
