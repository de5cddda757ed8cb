"""A private Redis for every test that asks for one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count

import pytest

from tracewire_bus.embedded import EmbeddedServer
from tracewire_bus.streams import Bus

_numbers = count()


@pytest.fixture(scope="session")
async def embedded() -> AsyncIterator[str]:
    """URL of an embedded Redis, shared by the session's tests: tell yours apart by prefix or trace ids."""
    async with EmbeddedServer.start() as server:
        yield server.url


@pytest.fixture
def prefix() -> str:
    """A key prefix that no other test uses."""
    return f"test{next(_numbers)}"


@pytest.fixture
async def bus(embedded: str, prefix: str) -> AsyncIterator[Bus]:
    """A bus of this test's own, on the shared Redis."""
    async with Bus.open(embedded, prefix=prefix) as bus:
        yield bus
