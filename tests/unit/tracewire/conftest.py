"""What the client's tests share: a scripted engine on the bus, and the model of one that is registered only."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.support.bus_engine import BusEngine, Script, engine_info, tiny
from tracewire import Client, Model


@pytest.fixture
def redis_url(embedded: str) -> str:
    """URL of the embedded Redis."""
    return embedded


@pytest.fixture
def engine(redis_url: str, prefix: str) -> Callable[..., Any]:
    """Runs a scripted engine: `async with engine(script):`."""

    def running(script: Script = tiny, **info: Any) -> Any:
        return BusEngine.running(redis_url, prefix, script, engine_info(**info))

    return running


@pytest.fixture
async def model(client: Client, registered: str) -> AsyncIterator[Model]:
    """The model of an engine that is registered only; whoever traces this thread is left alone."""
    before = sys.gettrace()
    yield await client.models.get("tiny")
    assert sys.gettrace() is before
