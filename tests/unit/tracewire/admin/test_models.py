"""A model is found by its name, and can be waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

import tracewire
from tracewire import Client, UnknownModel

PATIENCE = 60


async def test_a_model_can_be_waited_for(client: Client, engine: Callable[..., Any]) -> None:
    found: list[tracewire.Model] = []

    async def wait() -> None:
        found.append(await client.models.get("tiny", timeout=PATIENCE))

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        async with engine():
            with anyio.fail_after(PATIENCE):
                while not found:
                    await checkpoint()
    assert found[0].name == "tiny"


async def test_waiting_for_a_model_ends(client: Client) -> None:
    with pytest.raises(UnknownModel, match=r"after 0\.01 s"):
        await client.models.get("tiny", timeout=0.01)


async def test_submissions_that_wait_are_counted(client: Client, registered: str) -> None:
    assert await client.models.waiting("tiny") == 0
    for _ in range(2):
        await client.trace("tiny", "x", detach=True).start()
    assert await client.models.waiting("tiny") == 2
    assert 0 < await client.models.oldest("tiny") < await client.models.oldest("tiny")
    assert await client.models.waiting("other") == 0
    assert await client.models.oldest("other") == 0
