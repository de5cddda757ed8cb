"""An engine of two pipeline stages: what blocks and declared interventions do is the same as on one rank."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import pytest

import tracewire
from tests.support.blocks import parallel as blocks
from tests.support.engine_process import EngineProcess
from tests.support.parallel.layouts import Served
from tests.support.parallel.scenarios import GREEDY, PROMPT, SCENARIOS, outcome, same
from tracewire import Client, Model


@pytest.fixture(scope="module")
def stages(stages_starting: Served) -> Iterator[Served]:
    """An engine of two stages, which is no longer there after these tests."""
    stages_starting.engine.wait_ready()
    yield stages_starting
    stages_starting.engine.stop()


@pytest.fixture
async def client(stages: Served) -> AsyncIterator[Client]:
    """A client of that engine's bus."""
    async with stages.client() as client:
        yield client


@pytest.fixture
async def two(client: Client) -> Model:
    """Its model."""
    return await client.models.get("demo", timeout=30)


@pytest.mark.parametrize("name", SCENARIOS)
async def test_it_is_as_on_one_rank(
    name: str, client: Client, two: Model, engine: EngineProcess, engine_bus: str
) -> None:
    ours = await SCENARIOS[name](client, two)
    async with tracewire.connect(engine_bus) as other:
        theirs = await SCENARIOS[name](other, await other.models.get("demo", timeout=30))
    assert not same(theirs, ours, tolerance=0.02)


REFUSED = {
    "weights of the first": (blocks.weights(layer=1), "weight is on pipeline stage 0 only", "down_proj.weight"),
    "weights of the last": (blocks.weights(layer=6), "weight is on pipeline stage 1 only", "down_proj.weight"),
    "a call back": (blocks.calls_back, "which has finished its part of this step", "mlp(late)"),
    "passed meanwhile": (blocks.too_late, "the model had passed it before model.layers.5.mlp", "residual(2)"),
    "inside a module": (blocks.inside, "are not served under pipeline parallelism", ".source"),
    "a call of all": (blocks.calls_all, "cannot be called", "model.model("),
    "something else": (blocks.differs, "must do the same on all of them", "residual("),
    "failing on the first": (blocks.fails_on_one(stage=0), "only stage 0", "raise"),
    "failing on the last": (blocks.fails_on_one(stage=1), "only stage 1", "raise"),
    "endless on the first": (blocks.endless(layer=1), "ran for 3 s", "math.sqrt"),
    "endless on the last": (blocks.endless(layer=6), "ran for 3 s", "math.sqrt"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_what_stages_cannot_do_ends_its_own_trace_at_its_line(what: str, client: Client, two: Model) -> None:
    block, message, source = REFUSED[what]
    plain: list[Any] = []

    async def beside() -> None:
        plain.append(await outcome(client, two, max_tokens=20))

    async with anyio.create_task_group() as group:
        group.start_soon(beside)
        with anyio.fail_after(30):
            came_to = await outcome(client, two, block)
    assert came_to["status"] == "failed"
    kind, said, line, at = came_to["error"]
    assert message in said, (kind, said)
    assert source in at
    assert line > 1
    assert plain[0]["status"] == "finished"
    again = await outcome(client, two, max_tokens=20)
    assert again["choices"][0][0] == plain[0]["choices"][0][0]


async def test_paused_and_resumed(client: Client, two: Model) -> None:
    # So many that the trace is paused before it ends, on a busy machine too.
    expected = await outcome(client, two, blocks.carried(amount=0.125), max_tokens=160)
    async with (
        client.trace(two, PROMPT, blocks.reads_in_order, **GREEDY, max_tokens=200) as beside,
        client.trace(two, PROMPT, blocks.carried(amount=0.125), **GREEDY, max_tokens=160) as trace,
    ):
        async for item in trace:
            if isinstance(item, tracewire.Output) and item.index >= 4:
                break
        assert await trace.pause()
        seen = 0
        async for item in beside:
            seen += isinstance(item, tracewire.Output)
            if seen == 30:
                break
        await trace.resume()
        result = await trace.result()
    assert result.token_ids == expected["choices"][0][0]
    assert not same(expected["choices"][0][1], result.saves, tolerance=0.02)


async def test_random_numbers_are_the_same_on_all_stages(client: Client, two: Model) -> None:
    one, other = [await outcome(client, two, blocks.noisy) for _ in range(2)]
    for came_to in (one, other):
        for noise, added in came_to["choices"][0][1]["seen"]:
            assert not same(added, noise, tolerance=0.05)
    drawn = [item[0].tobytes() for came_to in (one, other) for item in came_to["choices"][0][1]["seen"]]
    assert len(set(drawn)) == 12


@tracewire.intervention
def counts_messages(model, tracer, live):  # type: ignore[no-untyped-def]
    """How many messages this stage has sent so far."""
    model.residual(0).output
    count = vars(model)["interleaver"].topology.messages.save()


async def test_what_shares_nothing_sends_nothing(client: Client, two: Model) -> None:
    """Steps without blocks, with blocks that have ended, and with interventions on the last stage only."""

    async def counted() -> int:
        return int((await outcome(client, two, counts_messages, max_tokens=1))["choices"][0][1]["count"])

    before = await counted()
    assert await counted() - before <= 2
    before = await counted()
    await outcome(client, two, max_tokens=50)
    await outcome(client, two, max_tokens=50, interventions=[tracewire.Probe("late", "residual(6)")])
    await outcome(client, two, blocks.without_a_loop, max_tokens=50)
    between = await counted() - before
    assert 1 <= between <= 6
    before = await counted()
    await outcome(client, two, blocks.reads_in_order, max_tokens=50)
    assert await counted() - before >= 50
