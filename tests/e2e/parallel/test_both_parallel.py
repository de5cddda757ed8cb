"""Engines of four workers: two stages of two tensor-parallel ranks each, and four stages. As on one rank."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import tracewire
from tests.support.engine_process import EngineProcess
from tests.support.parallel.layouts import Served, served
from tests.support.parallel.scenarios import SCENARIOS, TIES, same

pytestmark = pytest.mark.full

LAYOUTS = {
    "two by two": ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"),
    "four stages": ("--pipeline-parallel-size", "4"),
}


@pytest.fixture(scope="module", params=LAYOUTS)
async def workers(
    starts_engine: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    """An engine of four workers, two of them on each core."""
    async with served(tmp_path_factory.mktemp("workers"), *LAYOUTS[request.param], cores="0|1|0|1") as engine:
        yield engine


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in TIES])
async def test_it_is_as_on_one_rank(name: str, workers: Served, engine: EngineProcess, engine_bus: str) -> None:
    async with workers.client() as client:
        ours = await SCENARIOS[name](client, await client.models.get("demo", timeout=30))
    async with tracewire.connect(engine_bus) as client:
        theirs = await SCENARIOS[name](client, await client.models.get("demo", timeout=30))
    # bfloat16, summed in another order.
    assert not same(theirs, ours, tolerance=0.05)
