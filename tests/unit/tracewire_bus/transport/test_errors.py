"""An error of a connection, or of Redis, is raised to each caller that it belongs to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.trips import together
from tracewire_bus.transport.errors import BusError
from tracewire_bus.transport.pool import Connections


@pytest.fixture
async def connections(embedded: str) -> AsyncIterator[Connections]:
    """Connections to the embedded Redis."""
    connections = Connections(embedded, patience_s=5)
    yield connections
    await connections.aclose()


async def test_a_refused_call_is_its_callers_alone(connections: Connections, prefix: str) -> None:
    key = f"{prefix}:k"
    one, refused, other = await together(connections, ("SET", key, "a"), ("INCR", key), ("GET", key))
    assert (one, other) == (b"OK", b"a")
    assert isinstance(refused, BusError)


async def test_an_error_of_the_way_is_raised_to_each_caller(connections: Connections) -> None:
    async def open_(spare: Any = None) -> Any:
        raise BusError("no such service")

    connections._transport.open = open_  # type: ignore[method-assign]
    replies = await together(connections, *[("ECHO", "x")] * 3)
    assert [str(reply) for reply in replies] == ["no such service"] * 3
    assert len({id(reply) for reply in replies}) == 3
