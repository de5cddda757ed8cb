"""Appends that cannot be are refused before they are sent."""

from __future__ import annotations

import anyio
import pytest

from tracewire_bus.bus import Bus, BusError, EntryTooLarge
from tracewire_bus.events.appends import _AFTER, ENTRY_BYTES
from tracewire_bus.wire.codec import schema_text


async def test_what_follows_an_event_that_is_not_there_is_refused(bus: Bus) -> None:
    """In a pipeline an event before it may have been refused, and memory be there again by the time it comes."""
    key = bus.keys.events("t")

    async def after(behind: str, id_: str) -> None:
        await bus.command(*_AFTER((key,), id_, schema_text(), b"x", behind))

    async with bus.writer() as writer:
        await writer.append("t", 1, 0, b"begun")
        await after("1-0", "1-1")
        for behind in ("1-2", "1-0"):
            with pytest.raises(BusError, match=f"BEHIND {behind}"):
                await after(behind, "1-3")
    assert [id_ for id_, _ in await bus.command("XRANGE", key, "-", "+")] == [b"1-0", b"1-1"]


async def test_bad_appends_are_refused_before_they_are_sent(bus: Bus) -> None:
    async with bus.writer() as writer:
        for attempt, seq in ((0, 0), (1, -1)):
            with pytest.raises(ValueError, match="attempts count from 1"):
                await writer.append("t", attempt, seq, b"")
        with pytest.raises(EntryTooLarge, match="an entry holds"):
            await writer.append("t", 1, 0, bytes(ENTRY_BYTES + 1))
    with pytest.raises(anyio.ClosedResourceError):
        await writer.append("t", 1, 0, b"")
    assert not await bus.exists("t")
