"""Calls that are made at the same time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from tracewire_bus.transport.pool import Connections


@pytest.fixture
async def connections(embedded: str) -> AsyncIterator[Connections]:
    """Connections to the embedded Redis."""
    connections = Connections(embedded, patience_s=5)
    yield connections
    await connections.aclose()


async def together(connections: Connections, *commands: tuple[Any, ...]) -> list[Any]:
    """What each of these commands comes to, all asked for at once by tasks of their own."""
    found: dict[int, Any] = {}

    async def one(place: int, command: tuple[Any, ...]) -> None:
        try:
            found[place] = await connections.command(*command)
        except Exception as error:
            found[place] = error

    async with anyio.create_task_group() as group:
        for place, command in enumerate(commands):
            group.start_soon(one, place, command)
    return [found[place] for place in range(len(commands))]
