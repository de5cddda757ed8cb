"""A client on the session's Redis, with keys of its own for each test, and engines that are in its registry."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import tracewire
from tests.support import scripted_engine
from tests.support.bus_engine import engine_info
from tracewire import Client
from tracewire_bus.bus import Bus


@pytest.fixture
async def client(embedded: str, prefix: str) -> AsyncIterator[Client]:
    """A client on the session's Redis."""
    async with tracewire.connect(embedded, prefix=prefix, name="one") as client:
        yield client


@pytest.fixture
async def registered(bus: Bus) -> str:
    """The name of an engine that is in the registry and takes nothing."""
    info = engine_info(engine="registered")
    await bus.registry.register(info, ttl_s=600)
    return info.engine


@pytest.fixture
async def roomy(bus: Bus) -> str:
    """Likewise, of one whose context holds as many tokens as a test likes."""
    info = scripted_engine.info(engine="roomy")
    await bus.registry.register(info, ttl_s=600)
    return info.engine
