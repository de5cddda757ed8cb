"""A client for the SDK's tests, on the session's Redis, with keys of its own for each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import tracewire
from tracewire import Client


@pytest.fixture
def redis_url(embedded: str) -> str:
    """URL of the embedded Redis."""
    return embedded


@pytest.fixture
async def client(redis_url: str, prefix: str) -> AsyncIterator[Client]:
    """A client of that Redis."""
    async with tracewire.connect(redis_url, prefix=prefix) as client:
        yield client
