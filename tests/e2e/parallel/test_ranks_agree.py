"""Two tensor-parallel ranks of which one does something else: the trace ends with an error, the others go on."""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import tracewire
from tests.support.parallel.layouts import Served
from tracewire import Client, Model, Probe, Steer, TraceFailed

PROMPT = "def add(a, b):\n    return"
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture
async def client(ranks: Served) -> AsyncIterator[Client]:
    """A client of that engine's bus."""
    async with ranks.client() as client:
        yield client


@pytest.fixture
async def model(client: Client) -> Model:
    """Its model."""
    return await client.models.get("demo", timeout=30)


@tracewire.intervention
def parting(model, tracer, live, how, who, where):
    import time

    import torch

    rank = torch.distributed.get_rank()
    for step in tracer.iter[:]:
        if step == 2 and rank == who:
            if how == "raises":
                raise KeyError("only here")
            if how == "sleeps":
                time.sleep(60)
            if how == "stops":
                tracer.stop()
            if how == "ends":
                break
            if how == "skips":
                continue
        if where == "whole":
            model.model.layers[1].output
        if where == "sharded":
            model.model.layers[1].self_attn.qkv_proj.output
        if where == "called":
            hidden = model.model.layers[1].output[0]
            model.model.layers[2].mlp(hidden.clone())


@tracewire.intervention
def watching(model, tracer, live):
    sharded = [].save()
    for _ in tracer.iter[:]:
        sharded.append(float(model.model.layers[1].self_attn.qkv_proj.output[0].float().norm()))


async def check_beside(client: Client, model: Model, part: Any) -> TraceFailed:
    """What `part` raises, which ends its own trace while another one, which reads sharded values, goes on."""
    async with client.trace(model, PROMPT, watching, max_tokens=12, **GREEDY) as alone:
        expected = await alone.result()
    async with client.trace(model, PROMPT, watching, max_tokens=400, **GREEDY) as beside:
        await beside.__anext__()
        with pytest.raises(TraceFailed) as raised:
            await part()
        await beside.cancel()
    # The engine is the one that it was, and its ranks are together.
    async with client.trace(model, PROMPT, watching, max_tokens=12, **GREEDY) as again:
        result = await again.result()
    assert result.token_ids == expected.token_ids
    assert result.saves["sharded"] == expected.saves["sharded"]
    return raised.value


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("where", ["whole", "sharded", "called"])
@pytest.mark.parametrize("how", ["raises", "sleeps"])
async def test_a_block_that_fails_on_one_rank_only(
    client: Client, model: Model, how: str, where: str, who: int
) -> None:
    async def part() -> None:
        block = parting(how=how, who=who, where=where)
        async with client.trace(model, PROMPT, block, max_tokens=12, **GREEDY) as trace:
            await trace.result()

    error = await check_beside(client, model, part)
    named = {"raises": "KeyError", "sleeps": "BlockTimeout"}[how]
    if who == 0:
        assert named in str(error)
    else:
        assert "RanksDiffer" in str(error)
        assert "rank 1 of 2" in str(error)
        assert named in str(error)


@pytest.mark.parametrize("how", ["stops", "ends"])
async def test_a_block_that_ends_on_another_rank_only(client: Client, model: Model, how: str) -> None:
    async def part() -> None:
        block = parting(how=how, who=1, where="whole")
        async with client.trace(model, PROMPT, block, max_tokens=12, **GREEDY) as trace:
            await trace.result()

    error = await check_beside(client, model, part)
    assert "RanksDiffer" in str(error)
    assert "rank 1 of 2" in str(error)


@tracewire.intervention
def spoiling(model, tracer, live, who, spoilt):
    """Have steers of a rank find no memory, as of a GPU that others use too; or mend that."""
    import torch

    from tracewire_engine.worker.declared.groups import EditGroup

    if torch.distributed.get_rank() == who:
        if spoilt:
            EditGroup.whole = EditGroup.run

            def run(self, stage, error=torch.OutOfMemoryError):
                raise error("out of memory")

            EditGroup.run = run
        else:
            EditGroup.run = EditGroup.whole
    model.logits


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("at", ["residual(1)", "model.layers.1.self_attn.qkv_proj"])
async def test_a_steer_that_finds_no_memory_on_one_rank_only(client: Client, model: Model, at: str, who: int) -> None:
    async def change(spoilt: bool) -> None:
        async with client.trace(model, PROMPT, spoiling(who=who, spoilt=spoilt), max_tokens=1, **GREEDY) as trace:
            await trace.result()

    width = model.info.hidden_size
    if "qkv" in at:
        async with client.trace(model, PROMPT, watching_width, max_tokens=1, **GREEDY) as trace:
            width = (await trace.result()).saves["width"]
    interventions = [Steer(at, np.ones(width, np.float32)), Probe("read", at, reduce="norm")]

    async def part() -> None:
        async with client.trace(model, PROMPT, interventions=interventions, max_tokens=12, **GREEDY) as trace:
            await trace.result()

    await change(True)
    try:
        error = await check_beside(client, model, part)
    finally:
        await change(False)
    assert "out of memory" in str(error)
    assert ("rank 1 of 2" in str(error)) == (who == 1)
    await part()


@tracewire.intervention
def watching_width(model, tracer, live):
    width = int(model.model.layers[1].self_attn.qkv_proj.output[0].shape[-1]).save()
