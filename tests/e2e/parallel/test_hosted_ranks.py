"""Blocks in hosts on two tensor-parallel ranks: what they do and save is what they do and save inline, bit for bit.

A host that dies, or is too slow, ends its own trace, and the ranks stay together.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import tracewire
from tests.support.parallel.layouts import CAPACITY, Served, served
from tests.support.parallel.scenarios import GREEDY, PROMPT, SCENARIOS, outcome, same

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

#: Only declared interventions, for which it makes no difference.
WITHOUT_BLOCKS = {name for name in SCENARIOS if "declared" in name} - {"declared_and_a_block"} | {"attention_patterns"}


@pytest.fixture(scope="module")
async def hosted(starts_engine: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """An engine of two ranks, as `ranks` is one, whose blocks run in hosts."""
    options = ("--tensor-parallel-size", "2", "--max-num-seqs", "3", "--capacity", str(CAPACITY), "--blocks", "host")
    async with served(tmp_path_factory.mktemp("hosted"), *options) as engine:
        yield engine


@tracewire.intervention
def leaves(model, tracer, live, how):
    """Reads and changes what both ranks have a part of, until its host is of no use any more."""
    import os

    seen = [].save()
    for step in tracer.iter[:]:
        wide = model.model.layers[1].self_attn.qkv_proj.output[0]
        wide[:] *= 1.5
        seen.append(float(wide.float().norm()))
        if step == 2 and how == "exits":
            os._exit(1)
        if step == 2 and how == "loops":
            sum(range(10**12))


@tracewire.intervention
def watches(model, tracer, live):
    """Reads what both ranks have a part of."""
    seen = [].save()
    for step in tracer.iter[:]:
        seen.append(model.model.layers[1].self_attn.qkv_proj.output[0].float().clone())
        seen.append(model.model.layers[2].mlp.down_proj.input.float().clone())


@pytest.mark.parametrize(("how", "kind"), [("exits", "BlockHostLost"), ("loops", "BlockTimeout")])
async def test_a_lost_host_ends_its_own_trace(how: str, kind: str, hosted: Served) -> None:
    async with hosted.client() as client:
        model = await client.models.get("demo", timeout=30)
        expected = await outcome(client, model, watches)
        async with client.trace(model, PROMPT, watches, **GREEDY, max_tokens=400) as beside:
            await anext(aiter(beside))
            came_to = await outcome(client, model, leaves(how=how), max_tokens=20)
            await beside.cancel()
        assert (came_to["status"], came_to["error"][0]) == ("failed", kind)
        # The steps before have what was saved in them.
        ((_, saves, _),) = came_to["choices"]
        assert len(saves["seen"]) >= 2
        assert not same(expected, await outcome(client, model, watches))


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in WITHOUT_BLOCKS])
async def test_it_is_as_inline(name: str, hosted: Served, ranks: Served) -> None:
    async with hosted.client() as client:
        ours = await SCENARIOS[name](client, await client.models.get("demo", timeout=30))
    async with ranks.client() as client:
        theirs = await SCENARIOS[name](client, await client.models.get("demo", timeout=30))
    assert not same(theirs, ours)
