"""A connection that loses replies of scripts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.redis.proxy import Proxy, proxy
from tracewire_bus.bus import Bus
from tracewire_bus.transport.scripts import Script, with_text


@asynccontextmanager
async def losing(bus: Bus, folder: Path, call: Script | str) -> AsyncIterator[tuple[Bus, Proxy]]:
    """A bus of the same Redis that loses the reply to the next call of a command, or of a script, which Redis knows."""
    if isinstance(call, Script):
        text = with_text(("EVALSHA", call.digest))
        assert text is not None
        await bus.command("SCRIPT", "LOAD", text[1])
    async with proxy(bus.url, folder) as way, Bus.open(way.url, prefix=bus.keys.prefix) as far:
        way.swallow = (call if isinstance(call, str) else call.digest).encode()
        yield far, way
        assert way.swallowed.is_set()
