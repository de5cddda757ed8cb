"""Engines that draft."""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

import tracewire
from tests.support.engine_inside import engine_inside, forgotten
from tests.support.speculation import NGRAM
from tracewire import Client, Model


@pytest.fixture(scope="module")
async def drafted(starts_engine: None) -> AsyncIterator[tuple[Any, str]]:
    """An engine that drafts by n-grams."""
    async with engine_inside(speculative_config=NGRAM, max_num_seqs=64, kv_cache_memory_bytes=256 << 20) as served:
        yield served
        await forgotten(served[0])


@pytest.fixture
async def ours(drafted: tuple[Any, str]) -> AsyncIterator[Client]:
    """A client of it."""
    async with tracewire.connect(drafted[1]) as client:
        yield client


@pytest.fixture
async def model_of_ours(ours: Client) -> Model:
    """Its model."""
    return await ours.models.get("demo", timeout=60)
