"""Traced and plain requests on one real engine with few KV blocks and short steps.

Preempted traces end as they do alone: what they save, read and edit, and what of it came with which token. Plain
requests share prefixes and are computed in chunks; traced ones are not, and leave nothing behind that others use.
"""

# mypy: ignore-errors

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import tracewire
from tests.support.engine_inside import counts, engine_inside, forgotten
from tracewire import Client, Model, Output, Probe, Steer, TraceEnded
from tracewire_bus.wire.columns import layout_of
from tracewire_bus.wire.messages import Append, Columns

GREEDY = {"temperature": 0.0, "ignore_eos": True}
PLACES, BLOCKS, BLOCK_SIZE, LENGTH, STEP = 4, 24, 32, 640, 128


@pytest.fixture(scope="module")
async def served(starts_engine: None) -> AsyncIterator[tuple[Any, str]]:
    """The engine, and the URL of the Redis that it serves."""
    options = {"max_num_seqs": PLACES, "max_model_len": LENGTH, "max_num_scheduled_tokens": STEP}
    async with engine_inside(**options, block_size=BLOCK_SIZE, num_gpu_blocks_override=BLOCKS) as served:
        yield served


@pytest.fixture
async def engine(served: tuple[Any, str]) -> AsyncIterator[Any]:
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


@tracewire.intervention
def edits_by_position(model, tracer, live, amount, gate=""):
    """What it adds at the last position depends on the step: computed anew, the cache would be another.

    At step 10 it waits until there is a file `gate`, if that is named.
    """
    streams = [].save()
    inputs = {}.save()
    for step in tracer.iter[:]:
        while step == 10 and gate and not os.path.exists(gate):
            time.sleep(0.005)
        model.residual(1).output[-1]
        model.model.layers[2].output[0][-1, step % 16] += amount * (1 + step % 5)
        streams.append(model.residual(5).output.clone())
        inputs[step] = int(model.samples)


@tracewire.intervention
def whole(model, tracer, live):
    """All positions of the prompt."""
    stream = model.residual(3).output.save()


def ids(number: int, length: int) -> list[int]:
    """A prompt that shares no block with another's."""
    return [(17 * number + 7 * place + place * place) % 4000 + 1 for place in range(length)]


def same(ours: Any, theirs: Any) -> None:
    """Equal tokens, and saves that are equal but for what another composition of the batch makes of them."""
    assert ours.token_ids == theirs.token_ids
    assert ours.saves.keys() == theirs.saves.keys()
    for name, items in theirs.saves.items():
        if isinstance(items, dict):
            assert ours.saves[name] == items
            continue
        assert len(ours.saves[name]) == len(items)
        for one, other in zip(ours.saves[name], items, strict=True):
            one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
            assert one.shape == other.shape
            np.testing.assert_allclose(one, other, rtol=0.05, atol=0.05 * np.abs(other).max())


def submission(client: Client, model: Model, number: int, count: int, gate: str = "") -> Any:
    """A trace with a block that edits, a probe and a steering vector, each different by `number`."""
    vector = np.zeros(model.info.hidden_size, np.float32)
    vector[number] = 0.5
    return client.trace(
        model,
        ids(number, 120 + number),
        edits_by_position(amount=2.0 + number, gate=gate),
        interventions=[Probe("probed", "residual(6)", positions="all"), Steer("residual(0)", vector, positions="last")],
        max_tokens=count,
        **GREEDY,
    )


async def outcome(client: Client, trace: Any) -> tuple[Any, list[Any]]:
    """A trace's result, and its events."""
    async with trace:
        result = await trace.result()
    return result, [event async for event in client.subscribe(trace.id)]


def assert_each_step_told_once(events: list[Any], count: int) -> None:
    """Every token index in one output, with one item of the block's list and one of the probe's."""
    outputs = [event for event in events if isinstance(event, Output)]
    assert [output.index + place for output in outputs for place in range(len(output.token_ids))] == list(range(count))
    steps = [step for output in outputs for step in output.deltas]
    appended = [[len(delta.items) for delta in step if isinstance(delta, Append)] for step in steps]
    # The first comes with the name.
    assert appended[1:] == [[1]] * (count - 1)
    read = [[layout_of(delta.layout).names for delta in step if isinstance(delta, Columns)] for step in steps]
    assert read == [[("probed",)]] * count


async def test_preempted_traces_are_what_they_are_alone(engine: Any, client: Client, model: Model) -> None:
    count, numbers = 100, range(1, 5)
    alone = {number: await outcome(client, submission(client, model, number, count)) for number in numbers}
    before = (await counts(engine))["preemptions"]
    # All begin at once, so that they meet however slow anything is.
    async with AsyncExitStack() as stack:
        await engine.pause_all()
        try:
            traces = {
                number: await stack.enter_async_context(submission(client, model, number, count)) for number in numbers
            }
            for trace in traces.values():
                await trace.accepted()
        finally:
            await engine.resume_all()
        together = {
            number: (await trace.result(), [event async for event in client.subscribe(trace.id)])
            for number, trace in traces.items()
        }
    # 7 blocks of each, 23 in all.
    assert (await counts(engine))["preemptions"] > before
    for number in numbers:
        result, events = together[number]
        assert_each_step_told_once(events, count)
        assert [stream.shape[0] for stream in result.saves["streams"]] == [120 + number] + [1] * (count - 1)
        same(result, alone[number][0])


async def test_traces_among_plain_requests_that_come_and_go(engine: Any, client: Client, model: Model) -> None:
    numbers = range(1, 4)
    alone = {number: (await outcome(client, submission(client, model, number, 60)))[0] for number in numbers}
    plain = {}
    for number in range(8):
        async with client.trace(model, ids(20 + number, 200), max_tokens=10, **GREEDY) as trace:
            plain[number] = (await trace.result()).token_ids
    before = (await counts(engine))["preemptions"]
    ended, tokens = set(), {}

    async def preempted() -> bool:
        return (await counts(engine))["preemptions"] > before

    async def traced(number: int) -> None:
        # Once more until one lost its blocks: whether one does is up to who meets whom.
        for _ in range(10):
            result, events = await outcome(client, submission(client, model, number, 60))
            assert_each_step_told_once(events, 60)
            same(result, alone[number])
            if await preempted():
                break
        ended.add(number)

    async def ones(number: int) -> None:
        # As long as there are traces, so that they meet however fast anything is.
        while number not in tokens or len(ended) < len(numbers):
            async with client.trace(model, ids(20 + number, 200), max_tokens=10, **GREEDY) as trace:
                tokens[number] = (await trace.result()).token_ids

    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(ones, number)
            if number < len(numbers):
                group.start_soon(traced, numbers[number])
    assert await preempted()
    assert tokens == plain


async def test_a_paused_trace_that_gave_its_blocks_up_goes_on(engine: Any, client: Client, model: Model) -> None:
    alone, _ = await outcome(client, submission(client, model, 1, 200))
    before = (await counts(engine))["preemptions"]
    asked, pause = anyio.Event(), engine.pause

    async def asks(request: str) -> bool:
        asked.set()
        return await pause(request)

    async with AsyncExitStack() as stack:
        gate = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "gate"
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(engine, "pause", asks)
        trace = await stack.enter_async_context(submission(client, model, 1, 200, str(gate)))
        seen = 0
        async for item in trace:
            seen += len(getattr(item, "token_ids", ()))
            if seen >= 5:
                break
        await client.pause(trace.id)
        # It goes no further before the engine has been asked, however late that is.
        await asked.wait()
        gate.touch()
        with anyio.fail_after(30):
            while (await counts(engine))["paused"] == 0:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        # All blocks but one.
        async with client.trace(model, ids(30, 600), max_tokens=20, **GREEDY) as other:
            assert len((await other.result()).token_ids) == 20
        there = await counts(engine)
        assert there["preemptions"] == before + 1
        assert there["kept"] == 1
        await client.resume(trace.id)
        result = await trace.result()
    same(result, alone)
    # What came of edited KV, though it left and came back, serves nobody.
    async with client.trace(model, ids(1, 121), max_tokens=4, **GREEDY) as plain:
        assert (await plain.result()).usage.cached_tokens == 0


async def test_plain_requests_hit_the_prefix_cache(engine: Any, client: Client, model: Model) -> None:
    async def plain() -> Any:
        async with client.trace(model, ids(40, 200), max_tokens=8, **GREEDY) as trace:
            return await trace.result()

    first, second = await plain(), await plain()
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens == 200 // BLOCK_SIZE * BLOCK_SIZE
    assert second.token_ids == first.token_ids


@pytest.mark.parametrize("choices", [1, 2])
async def test_a_traced_request_neither_reads_nor_poisons_it(
    engine: Any, client: Client, model: Model, choices: int
) -> None:
    number = 50 + choices
    vector = np.full(model.info.hidden_size, 3.0, np.float32)
    edit = {"interventions": [Steer("residual(1)", vector)], **GREEDY}
    sampling = {"n": choices, **({"temperature": 1.0, "seed": 1} if choices > 1 else {})}
    # Edited first: what is computed then is nobody's.
    async with client.trace(model, ids(number, 200), max_tokens=8, **{**edit, **sampling}) as trace:
        edited = await trace.result()
    async with client.trace(model, ids(number, 200), max_tokens=8, **GREEDY) as trace:
        plain = await trace.result()
    assert (edited.usage.cached_tokens, plain.usage.cached_tokens) == (0, 0)
    # Then with the prompt in the cache: all of it is computed nevertheless.
    async with client.trace(model, ids(number, 200), whole, max_tokens=8, **{**GREEDY, **sampling}) as trace:
        traced = await trace.result()
    assert traced.usage.cached_tokens == 0
    assert [choice.saves["stream"].shape[0] for choice in traced.invokes[0].choices] == [200] * choices
    # And the next plain one finds what the last plain one left.
    async with client.trace(model, ids(number, 200), max_tokens=8, **GREEDY) as trace:
        again = await trace.result()
    assert again.usage.cached_tokens == 192
    assert again.token_ids == plain.token_ids
    if choices == 1:
        assert traced.token_ids == plain.token_ids != edited.token_ids


async def test_a_traced_prompt_longer_than_a_step_is_computed_whole(engine: Any, client: Client, model: Model) -> None:
    prompt = ids(60, 500)
    async with client.trace(model, prompt, whole, max_tokens=8, **GREEDY) as trace:
        traced = await trace.result()
    assert traced.saves["stream"].shape == (500, model.info.hidden_size)
    # A plain one is computed in four steps, and comes to the same.
    steps = (await counts(engine))["steps"]
    async with client.trace(model, prompt, max_tokens=8, **GREEDY) as trace:
        plain = await trace.result()
    assert (await counts(engine))["steps"] - steps >= 4 + 7
    steps = (await counts(engine))["steps"]
    async with client.trace(model, ids(61, 500), whole, max_tokens=8, **GREEDY) as trace:
        await trace.result()
    assert (await counts(engine))["steps"] - steps == 8
    assert plain.token_ids == traced.token_ids


async def test_long_traced_and_plain_prompts_beside_those_that_generate(
    engine: Any, client: Client, model: Model
) -> None:
    results: dict[int, Any] = {}

    async def one(number: int, block: Any, length: int, count: int) -> None:
        async with client.trace(model, ids(number, length), block, max_tokens=count, **GREEDY) as trace:
            results[number] = await trace.result()

    kinds = [(70, None, 4, 60), (71, whole, 300, 4), (72, None, 300, 4), (73, whole, 260, 4)]
    for kind in kinds:
        await one(*kind)
    alone = dict(results)
    async with anyio.create_task_group() as group:
        for kind in kinds:
            group.start_soon(one, *kind)
    for number, result in results.items():
        assert result.token_ids == alone[number].token_ids
    assert [results[number].saves["stream"].shape[0] for number in (71, 73)] == [300, 260]


async def test_cancelled_traces_leave_nothing(engine: Any, client: Client, model: Model) -> None:
    """Whatever they were at: running, preempted, paused, waiting. The fixture looks."""

    async def one(number: int) -> None:
        async with submission(client, model, number % 5, 100) as trace:
            seen = 0
            async for item in trace:
                seen += len(getattr(item, "token_ids", ()))
                if seen > 5 * number:
                    break
            if number % 3 == 0:
                # On a busy machine the trace may be over by now.
                with suppress(TraceEnded):
                    await client.pause(trace.id)

    async with anyio.create_task_group() as group:
        for number in range(9):
            group.start_soon(one, number)


async def test_what_preempted_invokes_share(engine: Any, client: Client, model: Model) -> None:
    """Nothing twice, nothing missing, each invoke's in order; and nothing left of it in the worker."""
    before, count = (await counts(engine))["preemptions"], 100
    with model.trace(max_tokens=count, **GREEDY) as tracer:
        rows = [].save()
        for number in range(1, 5):
            with tracer.invoke(ids(number, 120 + number)):
                for step in tracer.iter[:]:
                    rows.append((number, step, model.samples.item()))
    result = await tracer.result()
    assert (await counts(engine))["preemptions"] > before
    for invoke in result.invokes:
        (choice,) = invoke.choices
        mine = [row[1:] for row in result.shared["rows"] if row[0] == invoke.index + 1]
        assert mine == list(enumerate(choice.token_ids))


async def test_nothing_is_left_of_what_was_shared_or_asked_for(engine: Any, client: Client, model: Model) -> None:
    """Refused halfway, failed, or cancelled while some of the invokes wait. The fixture looks."""

    async def end(tracer: Any, seen: int | None) -> None:
        if seen is not None:
            async for _ in tracer:
                seen -= 1
                if seen < 0:
                    break
            if not await tracer.cancel():
                # It had come to its end before.
                await tracer.result()
                return
        with pytest.raises(tracewire.TracewireError):
            await tracer.result()

    async with anyio.create_task_group() as group:
        for case in range(6):
            with model.trace(max_tokens=40, **GREEDY) as tracer:
                rows = [].save()
                for number in range(PLACES + 2):
                    with tracer.invoke(ids(number, 30), logprobs=5000 if case == 0 and number == 3 else None):
                        for step in tracer.iter[:40]:
                            rows.append(model.samples.item())
                            if case == 1 and step == 2:
                                raise ValueError
                        result = tracer.result.save()
            group.start_soon(end, tracer, None if case < 2 else 8 * (case - 2))
