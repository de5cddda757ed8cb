"""An engine of two tensor-parallel ranks: what blocks and declared interventions do is the same as on one rank.

Were a change of live parameters not in the same step on both, the ranks' halves of the values would not match.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import tracewire
from tests.distributed.layouts import Served, served
from tests.distributed.scenarios import SCENARIOS, TIES, same
from tests.engine_process import EngineProcess
from tracewire import Client, Model


@pytest.fixture(scope="module")
async def ranks(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """An engine of two ranks, with a core each."""
    async with served(tmp_path_factory.mktemp("ranks"), "--tensor-parallel-size", "2") as engine:
        yield engine


@pytest.fixture
async def client(ranks: Served) -> AsyncIterator[Client]:
    """A client of that engine's bus."""
    async with ranks.client() as client:
        yield client


@pytest.fixture
async def two(client: Client) -> Model:
    """Its model."""
    return await client.model("demo", wait_for_engine=30)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in TIES])
async def test_it_is_as_on_one_rank(
    name: str, client: Client, two: Model, engine: EngineProcess, engine_bus: str
) -> None:
    ours = await SCENARIOS[name](client, two)
    async with tracewire.connect(engine_bus) as other:
        theirs = await SCENARIOS[name](other, await other.model("demo", wait_for_engine=30))
    # bfloat16, summed in another order.
    assert not same(theirs, ours, tolerance=0.05)
