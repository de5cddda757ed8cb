"""A client of the shared engine, its model, and the edits that stand on that."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest

import tracewire
from tests.support.engine_process import EngineProcess
from tracewire import Client, Edits, Model

# With AMX, oneDNN rounds a product of bfloat16 by how many rows it has. Tests compare steps of other numbers of rows.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


@pytest.fixture
async def client(engine: EngineProcess, engine_bus: str) -> AsyncIterator[Client]:
    """A client of the shared engine's bus."""
    async with tracewire.connect(engine_bus) as client:
        yield client


@pytest.fixture
async def model(client: Client) -> Model:
    """The demo model as the client sees it."""
    return await client.models.get("demo", timeout=30)


@pytest.fixture
async def edits(client: Client) -> AsyncIterator[Edits]:
    """The model's edits: none before, and none after."""
    edits = client.edits("demo")
    await edits.clear()
    yield edits
    await edits.clear()
