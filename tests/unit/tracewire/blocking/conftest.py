"""What programs of the blocking client share: a scripted engine, and a thread for the program."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import pytest

import tracewire
from tests.support.bus_engine import BusEngine, Script, engine_info, tiny

PATIENCE = 60


@pytest.fixture
async def serving(embedded: str, prefix: str) -> AsyncIterator[Any]:
    """Runs an engine, and a function on a thread with a blocking client's class, its URL and its prefix."""

    async def run(function: Any, script: Script = tiny, **info: Any) -> Any:
        async with BusEngine.running(embedded, prefix, script, engine_info(**info)):
            with anyio.fail_after(PATIENCE):
                made = partial(tracewire.blocking.Client, embedded, prefix=prefix)
                return await anyio.to_thread.run_sync(function, made, abandon_on_cancel=True)

    return run
