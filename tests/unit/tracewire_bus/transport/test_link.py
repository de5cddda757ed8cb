"""A connection of one caller that waits too long costs no other."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.trips import together
from tracewire_bus.transport.link import Link
from tracewire_bus.transport.pool import Connections


@pytest.fixture
async def connections(embedded: str) -> AsyncIterator[Connections]:
    """Connections to the embedded Redis."""
    connections = Connections(embedded, patience_s=5)
    yield connections
    await connections.aclose()


async def test_a_command_that_takes_too_long_costs_no_other_connection(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    await together(connections, *[("PING",)] * 4, *[("ECHO", b"x" * 40_000)] * 4)
    idle = len(connections._idle)
    assert idle > 1
    monkeypatch.setattr(Link.execute, "__kwdefaults__", {**(Link.execute.__kwdefaults__ or {}), "timeout_s": 0.01})
    with pytest.raises(TimeoutError):
        await connections.execute_once(("BLPOP", "nothing", 0), unbatched=True)
    assert len(connections._idle) == idle - 1
