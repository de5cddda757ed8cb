"""An engine of two tensor-parallel ranks: what blocks and declared interventions do is the same as on one rank.

Were a change of live parameters not in the same step on both, the ranks' halves of the values would not match. The
engine is a small one, where nobody gets more than there is room for.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import psutil
import pytest

import tracewire
from tests.support.blocks import edits as edit_blocks
from tests.support.blocks.steering import added, begins, dawdles, scheduled, steered
from tests.support.command_lines import command_line
from tests.support.engine_process import EngineProcess, left_running
from tests.support.parallel.layouts import CAPACITY, Served
from tests.support.parallel.scenarios import SCENARIOS, TIES, same
from tests.support.steering import LONG, PROMPT, check_order, direction, held_up, schedule_of, steer_along
from tracewire import Client, Live, Model, Steer
from tracewire_bus.bus import Bus


@pytest.fixture
async def client(ranks: Served) -> AsyncIterator[Client]:
    """A client of that engine's bus."""
    async with ranks.client() as client:
        yield client


@pytest.fixture
async def two(client: Client) -> Model:
    """Its model."""
    return await client.models.get("demo", timeout=30)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in TIES])
async def test_it_is_as_on_one_rank(
    name: str, client: Client, two: Model, engine: EngineProcess, engine_bus: str
) -> None:
    ours = await SCENARIOS[name](client, two)
    async with tracewire.connect(engine_bus) as other:
        theirs = await SCENARIOS[name](other, await other.models.get("demo", timeout=30))
    # bfloat16, summed in another order.
    assert not same(theirs, ours, tolerance=0.05)


async def test_a_block_steered_on_two_ranks(client: Client, two: Model) -> None:
    vector, sampling = direction(two), {"max_tokens": 150, "temperature": 0.0, "ignore_eos": True}
    async with client.trace(two, PROMPT, steered(direction=vector), live={"alpha": 0.0}, **sampling) as trace:
        items = await steer_along(trace, [3.0, -2.0, 5.5, 0.5, -4.0], 7, in_turn=True)
        live = await trace.result()
    check_order(items)
    expected = schedule_of(items, 0.0, 150)
    assert live.saves["used"][:150] == expected
    assert len(set(expected)) == 6
    block = scheduled(direction=vector, schedule=expected)
    async with client.trace(two, PROMPT, block, **sampling) as trace:
        known = await trace.result()
    assert live.token_ids == known.token_ids
    assert live.digest() == known.digest()


async def test_a_declared_intervention_steered_on_two_ranks(client: Client, two: Model) -> None:
    vector, sampling = direction(two), {"max_tokens": 100, "temperature": 0.0, "ignore_eos": True}
    interventions = [Steer("residual(2)", Live("vector"), scale=Live("alpha"))]
    live: dict[str, Any] = {"alpha": 0.0, "vector": vector}
    async with held_up(client, two):
        async with client.trace(two, PROMPT, interventions=interventions, live=live, **sampling) as trace:
            items = await steer_along(trace, [3.0, -2.0, 4.5], 9, in_turn=True)
            result = await trace.result()
        check_order(items)
        vectors = [np.float32(alpha) * vector for alpha in schedule_of(items, 0.0, 100)]
        async with client.trace(two, PROMPT, added(vectors=vectors), **sampling) as trace:
            known = await trace.result()
    assert result.token_ids == known.token_ids


async def test_edits_on_two_ranks(client: Client, two: Model) -> None:
    """Each rank runs them: what is read is gathered, and what is changed is changed on both."""
    sampling = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    vector = direction(two)
    async with client.trace(two, PROMPT, scheduled(direction=vector, schedule=[3.0] * 12), **sampling) as trace:
        known = await trace.result()
    edits = client.edits(two)
    await edits.install("bent", scheduled(direction=vector, schedule=[3.0] * 12))
    await edits.install("read", edit_blocks.watch)
    try:
        async with client.trace(two, PROMPT, edit_blocks.watch, **sampling) as trace:
            result = await trace.result()
    finally:
        await edits.clear()
    assert result.token_ids == known.token_ids
    assert result.save_errors == {}
    for read, own in zip(result.saves["read/hidden"], result.saves["hidden"], strict=True):
        assert np.array_equal(read, own)
    async with client.trace(two, PROMPT, edit_blocks.watch, **sampling) as trace:
        plain = await trace.result()
    assert not np.array_equal(plain.saves["hidden"][0], result.saves["hidden"][0])


async def test_priorities_reach_the_scheduler(client: Client, two: Model) -> None:
    """While the engine is full, what comes later and is more urgent begins first."""
    async with AsyncExitStack() as stack:
        # Their blocks make each step slow, so that they last.
        full = [
            await stack.enter_async_context(client.trace(two, PROMPT, dawdles(seconds=0.01), **LONG)) for _ in "abc"
        ]
        for trace in full:
            await anext(aiter(trace))
        begun: dict[int, float] = {}

        async def one(priority: int) -> None:
            async with client.trace(two, PROMPT, begins, max_tokens=2, priority=priority) as trace:
                await trace.accepted()
                started.set()
                begun[priority] = (await trace.result()).saves["at"]

        async with anyio.create_task_group() as group:
            for priority in (5, 0, -5):
                started = anyio.Event()
                group.start_soon(one, priority)
                await started.wait()
            await full[0].cancel()
        assert sorted(begun, key=lambda priority: begun[priority]) == [-5, 0, 5]


async def test_an_engine_takes_no_more_than_its_capacity(client: Client, two: Model, ranks: Served) -> None:
    """And what waits takes turns: a client with one submission need not wait for another's many."""
    spans: dict[str, tuple[float, float]] = {}
    under_way = anyio.Event()

    async def one(owner: Client, name: str) -> None:
        async with owner.trace(two, PROMPT, trace_id=name, max_tokens=12, ignore_eos=True) as trace:
            accepted = await trace.accepted()
            await trace.result()
        (final,) = [event async for event in client.subscribe(name) if isinstance(event, tracewire.Final)]
        spans[name] = accepted.accepted_at, final.time
        under_way.set()

    async with (
        tracewire.connect(ranks.url, name="many") as many,
        tracewire.connect(ranks.url, name="single") as single,
        anyio.create_task_group() as group,
    ):
        for number in range(60):
            group.start_soon(one, many, f"many-{number}")
        await under_way.wait()
        group.start_soon(one, single, "single")
    marks = sorted([(begin, 1) for begin, _ in spans.values()] + [(end, -1) for _, end in spans.values()])
    assert max(itertools.accumulate(change for _, change in marks)) <= CAPACITY
    later = [name for name, (begin, _) in spans.items() if begin > spans["single"][0]]
    assert len(later) > 30


async def test_two_ranks_share_each_value_once(client: Client, two: Model) -> None:
    """What all invokes share is changed on both ranks and told once, for more of them than run at once."""
    with two.trace(max_tokens=4, temperature=0.0, ignore_eos=True) as tracer:
        rows, total = [].save(), np.zeros(1).save()
        for index in range(8):
            with tracer.invoke([index + 1, 7]):
                for step in tracer.iter[:4]:
                    rows.append((index, step, two.samples.item()))
                    total += 1
                text = tracer.result.outputs[0].text.save()
    result = await tracer.result()
    generated = [
        (invoke.index, step, token)
        for invoke in result.invokes
        for step, token in enumerate(invoke.choices[0].token_ids)
    ]
    assert sorted(result.shared["rows"]) == generated
    assert result.shared["total"] == [32.0]
    assert tracer.saves["text"] == [invoke.choices[0].text for invoke in result.invokes]


async def test_a_killed_supervisor_leaves_no_process(client: Client, ranks: Served) -> None:
    """The last of this engine."""
    below = ranks.engine.descendants()
    names = [command_line(process) for process in below]
    assert [sum(kind in name for name in names) for kind in ("EngineCore", "Worker")] == [1, 2]
    trace = await left_running(client)
    ranks.engine.process.kill()
    _, alive = await anyio.to_thread.run_sync(lambda: psutil.wait_procs(below, timeout=30))
    assert not alive
    await trace.aclose()
    async with Bus.open(ranks.url) as bus:
        last = await bus.tail_id(trace.id)
    # No lie on the stream: the trace has not ended, or the adapter has outlived vLLM for long enough to say so.
    if not last.startswith("1-"):
        with pytest.raises(tracewire.EngineLost):
            await client.subscribe(trace.id).result()
