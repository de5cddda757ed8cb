"""Clients of the shared engine, and the mark of what starts engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import tracewire
from tests.engine_process import EngineProcess
from tracewire import Client, Model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of this folder that use a real engine end in `_engine.py`."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and item.path.stem.endswith("_engine"):
            item.add_marker(pytest.mark.engine)


@pytest.fixture
async def live_client(engine: EngineProcess, engine_bus: str) -> AsyncIterator[Client]:
    """A client of the shared engine's bus."""
    async with tracewire.connect(engine_bus, client="submitter") as client:
        yield client


@pytest.fixture
async def model(live_client: Client) -> Model:
    """The demo model as the client sees it."""
    return await live_client.model("demo", wait_for_engine=30)
