"""Two ranks: a change reaches both before the same step. Were it not so, their halves of the values would not match."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

import tracewire
from tests.control.blocks import added, scheduled, steered
from tests.control.common import PROMPT, check_order, direction, held_up, schedule_of, steer_along
from tests.engine_process import EngineProcess, running_engine
from tracewire import Client, Live, Model, Steer
from tracewire_bus.embedded import EmbeddedServer


@pytest.fixture(scope="module")
async def ranks_bus() -> AsyncIterator[str]:
    """A Redis of these tests' own."""
    async with EmbeddedServer.start() as server:
        yield server.url


@pytest.fixture(scope="module")
def ranks(ranks_bus: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine of two ranks, on a core each."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with running_engine(ranks_bus, folder, "--tensor-parallel-size", "2", environment=environment) as engine:
        yield engine


@pytest.fixture
async def client(ranks: EngineProcess, ranks_bus: str) -> AsyncIterator[Client]:
    """A client of that engine's bus."""
    async with tracewire.connect(ranks_bus) as client:
        yield client


@pytest.fixture
async def two(client: Client) -> Model:
    """Its model."""
    return await client.model("demo", wait_for_engine=30)


async def test_a_block_steered_on_two_ranks(client: Client, two: Model) -> None:
    vector, sampling = direction(two), {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True}
    async with client.trace(two, PROMPT, steered(direction=vector), live={"alpha": 0.0}, **sampling) as trace:
        items = await steer_along(trace, [3.0, -2.0, 5.5, 0.5, -4.0], 7)
        live = await trace.result()
    check_order(items)
    expected = schedule_of(items, 0.0, 60)
    assert live.saves["used"][:60] == expected
    assert len(set(expected)) == 6
    block = scheduled(direction=vector, schedule=expected)
    async with client.trace(two, PROMPT, block, **sampling) as trace:
        known = await trace.result()
    assert live.token_ids == known.token_ids
    assert live.digest() == known.digest()


async def test_a_declared_intervention_steered_on_two_ranks(client: Client, two: Model) -> None:
    vector, sampling = direction(two), {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True}
    interventions = [Steer("residual(2)", Live("vector"), scale=Live("alpha"))]
    live: dict[str, Any] = {"alpha": 0.0, "vector": vector}
    async with held_up(client, two):
        async with client.trace(two, PROMPT, interventions=interventions, live=live, **sampling) as trace:
            items = await steer_along(trace, [3.0, -2.0, 4.5], 9)
            result = await trace.result()
        check_order(items)
        vectors = [np.float32(alpha) * vector for alpha in schedule_of(items, 0.0, 60)]
        async with client.trace(two, PROMPT, added(vectors=vectors), **sampling) as trace:
            known = await trace.result()
    assert result.token_ids == known.token_ids
