"""Each declared kind equals a block that does the same: on one rank, on two tensor-parallel ranks, on two stages."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import tracewire
from tests.support import ROOT
from tests.support.engine_process import EngineProcess
from tests.support.parallel.kinds import KINDS, LAYOUTS, TABLE, differences, of_prompts
from tests.support.parallel.layouts import Served
from tracewire import Client


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    """The layout of the engine."""
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def url(request: pytest.FixtureRequest, layout: str, starts_engine: None) -> str:
    """The Redis of such an engine."""
    if layout == "one rank":
        engine: EngineProcess = request.getfixturevalue("engine")
        engine.wait_ready()
        found: str = request.getfixturevalue("engine_bus")
        return found
    served: Served = request.getfixturevalue("ranks" if layout == "two ranks" else "stages_starting")
    served.engine.wait_ready()
    return served.url


@pytest.fixture
async def client(url: str) -> AsyncIterator[Client]:
    """A client of it."""
    async with tracewire.connect(url) as client:
        yield client


@pytest.mark.parametrize("name", KINDS)
async def test_it_is_what_a_block_does(name: str, client: Client, layout: str) -> None:
    model = await client.models.get("demo", timeout=30)
    assert not await differences(client, model, KINDS[name], layout)


async def test_a_patch_from_another_prompt_is_what_blocks_read_and_write(client: Client, layout: str) -> None:
    assert not await of_prompts(client, await client.models.get("demo", timeout=30), layout)


def test_the_page_says_how_far_they_may_be_apart() -> None:
    assert TABLE in (ROOT / "docs" / "internals" / "declared-interventions.md").read_text()
