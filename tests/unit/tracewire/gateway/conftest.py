"""A gateway in this process, over a scripted engine on the test's own keys of the session's Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.support.gateways import Served, serving


@pytest.fixture
def gateway(redis_url: str, prefix: str) -> Callable[..., Any]:
    """Runs a gateway: `async with gateway(concurrency=1) as served:`."""

    def running(**settings: Any) -> Any:
        return serving(redis_url, prefix, **settings)

    return running


@pytest.fixture
async def served(gateway: Callable[..., Any]) -> AsyncIterator[Served]:
    """A gateway with the usual settings."""
    async with gateway() as served:
        yield served
