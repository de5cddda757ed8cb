"""A client of the shared engine, and the mark of what starts engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import tracewire
from tests.engine_process import EngineProcess
from tracewire import Client, Model

#: Test files of this folder that start no engine.
ENGINELESS = {
    *("test_block_ends.py", "test_declared_plan.py", "test_large.py", "test_marks.py"),
    *("test_passing.py", "test_ring.py", "test_saves.py", "test_taps.py"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts an engine, so that `make test-engineless` can leave it out."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and item.path.name not in ENGINELESS:
            item.add_marker(pytest.mark.engine)


@pytest.fixture
async def client(engine: EngineProcess, engine_bus: str) -> AsyncIterator[Client]:
    """A client of the shared engine's bus."""
    async with tracewire.connect(engine_bus) as client:
        yield client


@pytest.fixture
async def model(client: Client) -> Model:
    """The demo model as the client sees it."""
    return await client.model("demo", wait_for_engine=30)
