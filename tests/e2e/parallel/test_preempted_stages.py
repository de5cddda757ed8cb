"""Traces that lose their KV blocks to others on two pipeline stages: each stage keeps its share, and goes on with it.

A step is on its way through the stages when the scheduler takes a request's blocks away. The engine is that of
`tests/e2e/scheduling/test_scheduling.py` in two stages, and passes its tests of preemption.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest

import tracewire
from tests.e2e.scheduling import test_scheduling as one_stage
from tests.e2e.scheduling.test_scheduling import assert_each_step_told_once, outcome, same, submission
from tests.support.engine_inside import counts, engine_inside, forgotten
from tests.support.engine_process import EngineProcess
from tracewire import Client, Model

pytestmark = pytest.mark.full

#: Its tests that take blocks away from somebody.
TRIED = (
    one_stage.test_preempted_traces_are_what_they_are_alone,
    one_stage.test_traces_among_plain_requests_that_come_and_go,
    one_stage.test_a_paused_trace_that_gave_its_blocks_up_goes_on,
    one_stage.test_cancelled_traces_leave_nothing,
    one_stage.test_what_preempted_invokes_share,
)


@pytest.fixture(scope="module")
async def served(starts_engine: None) -> AsyncIterator[tuple[Any, str]]:
    """The engine, a core for each stage, and the URL of the Redis that it serves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        async with engine_inside(
            pipeline_parallel_size=2,
            check_collect=False,
            max_num_seqs=one_stage.PLACES,
            max_model_len=one_stage.LENGTH,
            max_num_scheduled_tokens=one_stage.STEP,
            block_size=one_stage.BLOCK_SIZE,
            num_gpu_blocks_override=one_stage.BLOCKS,
        ) as served:
            yield served


@pytest.fixture
async def stages(served: tuple[Any, str]) -> AsyncIterator[Any]:
    """The engine, which holds nothing when a test has ended, not even a KV block."""
    yield served[0]
    await forgotten(served[0])


@pytest.fixture
async def client(served: tuple[Any, str]) -> AsyncIterator[Client]:
    """A client of the engine's bus."""
    async with tracewire.connect(served[1]) as client:
        yield client


@pytest.fixture
async def model(client: Client) -> Model:
    """The demo model as the client sees it."""
    return await client.models.get("demo", timeout=30)


@pytest.mark.parametrize("tried", TRIED, ids=lambda tried: tried.__name__)
async def test_as_on_one_stage(tried: Callable[..., Any], stages: Any, client: Client, model: Model) -> None:
    await tried(stages, client, model)


async def test_preempted_traces_are_what_they_are_on_one_rank(
    stages: Any, client: Client, model: Model, engine: EngineProcess, engine_bus: str
) -> None:
    """They read, edit and are steered on both stages."""
    count, numbers = 100, range(1, 5)
    async with tracewire.connect(engine_bus) as other:
        theirs = await other.models.get("demo", timeout=30)
        known = {number: (await outcome(other, submission(other, theirs, number, count)))[0] for number in numbers}
    before = (await counts(stages))["preemptions"]
    together: dict[int, Any] = {}

    async def run(number: int) -> None:
        together[number] = await outcome(client, submission(client, model, number, count))

    async with anyio.create_task_group() as group:
        for number in numbers:
            group.start_soon(run, number)
    assert (await counts(stages))["preemptions"] > before
    for number in numbers:
        result, events = together[number]
        assert_each_step_told_once(events, count)
        same(result, known[number])
