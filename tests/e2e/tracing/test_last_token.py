"""What is saved ends at the very token at which the trace ends, whoever ends it.

The model goes on with a request until whoever ends it has said so: by then its blocks, caches and standing
interventions may have been in later steps. Each run here has others beside it, so that how many steps differs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest

import tracewire
from tests.support.blocks import tracing as blocks
from tracewire import Client, InterventionError, Model, Probe, Prompt, StopWhen, TraceFailed

PROMPT = "def add(a, b):\n    return"
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 20}


@tracewire.intervention
def cached(model, tracer, live, at, stop):
    """Raises or stops, beside a cache."""
    cache = tracer.cache(modules=[model.model.layers[0].mlp])
    for step in tracer.iter[:]:
        model.logits
        if step == at:
            if stop:
                tracer.stop()
            raise ValueError("mine")


@tracewire.intervention
def watched(model, tracer, live):
    """Ends nothing, and has a list, a cache, numbers that it rebinds, and a dict."""
    cache = tracer.cache(modules=[model.model.layers[0].mlp])
    seen = [].save()
    by_step = {}.save()
    for step in tracer.iter[:]:
        norm = float(model.residual(0).output[-1].float().norm())
        seen.append(norm)
        by_step[step] = norm
        latest = (step + 1000).save()


@tracewire.intervention
def standing(model, tracer, live):
    """A standing intervention with an open list and a cache."""
    cache = tracer.cache(modules=[model.model.layers[1].mlp])
    open_list = [].save()
    for _ in tracer.iter[:]:
        open_list.append(float(model.residual(1).output[-1].float().norm()))


def visits(saves: dict[str, Any], name: str = "cache") -> int:
    """How many visits a cache of one module has."""
    (entries,) = saves[name].values()
    return len(entries)


def assert_watched(saves: dict[str, Any], tokens: int) -> None:
    """What `watched` saved is of that many tokens."""
    assert visits(saves) == len(saves["seen"]) == tokens
    assert saves["by_step"] == dict(enumerate(saves["seen"]))
    assert saves["latest"] == 1000 + tokens - 1


async def raises_beside_a_cache(client: Client, model: Model) -> None:
    async with client.trace(model, PROMPT, cached(at=1, stop=False), **GREEDY) as trace:
        with pytest.raises(InterventionError, match="mine") as raised:
            await trace.result()
        state = await client.get_state(trace.id)
    assert raised.value.type == "ValueError"
    # Nor is it a mismatch.
    assert raised.value.__cause__ is None
    assert visits(state.saves) == len(state.token_ids) == 2


async def stops_beside_a_cache(client: Client, model: Model) -> None:
    async with client.trace(model, PROMPT, cached(at=1, stop=True), **GREEDY) as trace:
        result = await trace.result()
    assert result.status == "stopped"
    assert visits(result.saves) == len(result.token_ids) == 2


async def stops_in_one_of_two_invokes(client: Client, model: Model) -> None:
    prompts = [Prompt(PROMPT, block=cached(at=1, stop=True)), Prompt("import os\n", block=watched)]
    async with client.trace(model, prompts=prompts, **GREEDY) as trace:
        result = await trace.result()
    first, second = (invoke.choices[0] for invoke in result.invokes)
    assert visits(first.saves) == len(first.token_ids) == 2
    assert len(second.token_ids) == GREEDY["max_tokens"]
    assert_watched(second.saves, len(second.token_ids))


async def a_stop_condition_beside_a_list_and_a_cache(client: Client, model: Model) -> None:
    interventions = [Probe("p", "residual(3)", weight=np.ones(256, np.float32)), StopWhen("p", above=-1e30, steps=3)]
    async with client.trace(model, PROMPT, watched, interventions=interventions, **GREEDY) as trace:
        result = await trace.result()
    assert result.status == "stopped"
    assert len(result.token_ids) == len(result.saves["p"]) == 3
    assert_watched(result.saves, 3)


async def a_stop_string_beside_a_list_and_a_cache(client: Client, model: Model) -> None:
    async with client.trace(model, PROMPT, watched, **GREEDY, stop=["a", "e", "i", "o"]) as trace:
        result = await trace.result()
    assert len(result.token_ids) < GREEDY["max_tokens"]
    assert_watched(result.saves, len(result.token_ids))


VARIANTS: list[Callable[[Client, Model], Awaitable[None]]] = [
    raises_beside_a_cache,
    stops_in_one_of_two_invokes,
    stops_beside_a_cache,
    a_stop_condition_beside_a_list_and_a_cache,
    a_stop_string_beside_a_list_and_a_cache,
]


@asynccontextmanager
async def load(client: Client, model: Model, traces: int) -> AsyncIterator[None]:
    """Others in the batch, which come and go."""

    async def keep_going(number: int) -> None:
        while True:
            block = blocks.two_names if number % 2 else None
            async with client.trace(model, "import os\n" * (number + 1), block, **{**GREEDY, "max_tokens": 7}) as trace:
                await trace.result()

    async with anyio.create_task_group() as group:
        for number in range(traces):
            group.start_soon(keep_going, number)
        yield
        group.cancel_scope.cancel()


async def many(one: Callable[[Client, Model], Awaitable[None]], client: Client, model: Model, runs: int) -> None:
    """That many runs, four at a time, beside load."""
    numbers = iter(range(runs))

    async def some() -> None:
        for _ in numbers:
            await one(client, model)

    async with load(client, model, 3), anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(some)


@pytest.mark.parametrize("one", VARIANTS, ids=lambda one: one.__name__)
async def test_saves_end_with_the_tokens(client: Client, model: Model, one: Any) -> None:
    await many(one, client, model, 12)


@pytest.mark.full
@pytest.mark.parametrize("one", VARIANTS, ids=lambda one: one.__name__)
async def test_saves_end_with_the_tokens_in_every_run(client: Client, model: Model, one: Any) -> None:
    await many(one, client, model, 200)


async def test_what_stands_on_a_model_ends_with_the_tokens_too(client: Client, model: Model) -> None:
    """A standing intervention beside a block that raises, and one that stops."""
    edits = client.edits(model)
    await edits.install("standing", standing)
    try:

        async def one(client: Client, model: Model) -> None:
            async with client.trace(model, PROMPT, cached(at=2, stop=True), **GREEDY) as trace:
                result = await trace.result()
            assert len(result.token_ids) == visits(result.saves) == 3
            assert len(result.saves["standing/open_list"]) == visits(result.saves, "standing/cache") == 3
            async with client.trace(model, PROMPT, cached(at=2, stop=False), **GREEDY) as trace:
                with pytest.raises(InterventionError, match="mine") as raised:
                    await trace.result()
                assert raised.value.__cause__ is None
                state = await client.get_state(trace.id)
            assert len(state.token_ids) == visits(state.saves) == 3
            assert len(state.saves["standing/open_list"]) == visits(state.saves, "standing/cache") == 3

        await many(one, client, model, 6)
    finally:
        await edits.remove("standing")


async def test_a_cancelled_trace_has_the_saves_of_its_tokens(client: Client, model: Model) -> None:
    async def one(client: Client, model: Model) -> None:
        async with client.trace(model, PROMPT, watched, **{**GREEDY, "max_tokens": 500}) as trace:
            with pytest.raises(TraceFailed):
                async for item in trace:
                    if isinstance(item, tracewire.Output) and item.index >= 3:
                        await client.cancel(trace.id)
            with pytest.raises(TraceFailed) as raised:
                await trace.result()
            assert raised.value.__cause__ is None
            state = await client.get_state(trace.id)
        assert state.status == "cancelled"
        assert_watched(state.saves, len(state.token_ids))

    await many(one, client, model, 12)
