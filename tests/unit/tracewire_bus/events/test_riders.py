"""Commands that go with a flush are answered apart from it, and are told of a connection that fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from tracewire_bus.bus import Bus
from tracewire_bus.events.riders import execute_with
from tracewire_bus.transport.link import Link


class Noted:
    """Riders of these commands, and the replies that they had."""

    def __init__(self, *commands: tuple[Any, ...]) -> None:
        self.commands = commands
        self.had: list[Sequence[Any]] = []

    def board(self) -> Sequence[tuple[Any, ...]]:
        commands, self.commands = self.commands, ()
        return commands

    def landed(self, replies: Sequence[Any]) -> None:
        self.had.append(replies)


class Broken:
    """A link whose connection fails."""

    async def execute(self, *commands: Any, **options: Any) -> list[Any]:
        raise ConnectionError


async def test_riders_have_their_own_replies(bus: Bus) -> None:
    riders = Noted(("ECHO", "b"), ("HGET", bus.keys.audit), ("ECHO", "c"))
    link = bus._connections.link()
    try:
        assert await execute_with(riders, link, []) == []
        assert await execute_with(None, link, [("ECHO", "a")]) == [b"a"]
        assert await execute_with(riders, link, [("ECHO", "a")]) == [b"a"]
        assert await execute_with(riders, link, [("ECHO", "a")]) == [b"a"]
    finally:
        await link.drop()
    ((first, refused, last),) = riders.had
    assert (first, last) == (b"b", b"c")
    assert isinstance(refused, Exception)


async def test_riders_of_a_connection_that_fails_have_no_replies() -> None:
    riders = Noted(("ECHO", "b"))
    with pytest.raises(ConnectionError):
        await execute_with(riders, cast("Link", Broken()), [("ECHO", "a")])
    assert riders.had == [[]]


async def test_a_flush_carries_them(bus: Bus) -> None:
    riders = Noted(("RPUSH", bus.keys.audit_code("x"), "y"))
    async with bus.writer() as writer:
        writer.riders = riders
        await writer.append("t", 1, 0, b"a")
        await writer.append("t", 1, 1, b"b", final=True)
    assert riders.had == [[1]]
