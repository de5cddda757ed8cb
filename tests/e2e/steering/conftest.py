"""Clients of the shared engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import tracewire
from tests.support.engine_process import EngineProcess
from tracewire import Client, Model


@pytest.fixture
async def live_client(engine: EngineProcess, engine_bus: str) -> AsyncIterator[Client]:
    """A client of the shared engine's bus."""
    async with tracewire.connect(engine_bus, name="submitter") as client:
        yield client


@pytest.fixture
async def model(live_client: Client) -> Model:
    """The demo model as the client sees it."""
    return await live_client.models.get("demo", timeout=30)
