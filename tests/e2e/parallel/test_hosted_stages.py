"""Blocks in hosts on two pipeline stages, of which the last has the hosts: they come to what they come to inline.

Bit for bit, for blocks that only read, for which no stage waits, and for blocks that may write, for which both do.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

import tracewire
from tests.support.blocks import parallel as blocks
from tests.support.parallel.layouts import Served, served
from tests.support.parallel.scenarios import GREEDY, PROMPT, SCENARIOS, outcome, same

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

#: Only declared interventions, for which it makes no difference.
WITHOUT_BLOCKS = {name for name in SCENARIOS if "declared" in name} - {"declared_and_a_block"} | {"attention_patterns"}

#: Blocks that only read, with options of their traces.
READS = {
    "all layers": (blocks.reads_in_order, {}),
    "logits and samples": (blocks.logits_and_samples, {}),
    "several choices": (blocks.logits_and_samples, {"n": 2, "temperature": 0.8, "seed": 5}),
    "tokens": (blocks.fed, {}),
    "both stages in one expression": (blocks.arithmetic, {"max_tokens": 40}),
    "several prompts": (blocks.arithmetic, {"prompt": [PROMPT, "x", "import numpy as"]}),
    "the prompt only": (blocks.without_a_loop, {}),
    "a long prompt": (blocks.without_a_loop, {"prompt": list(range(1, 300))}),
    "some steps": (blocks.later_steps, {"max_tokens": 9}),
}


@pytest.fixture(scope="module")
async def hosted(starts_engine: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """An engine of two stages whose blocks run in hosts."""
    options = ("--pipeline-parallel-size", "2", "--blocks", "host")
    async with served(tmp_path_factory.mktemp("hosted"), *options) as engine:
        yield engine


@pytest.fixture(scope="module")
async def inline(starts_engine: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """The same engine, whose blocks run in its workers."""
    options = ("--pipeline-parallel-size", "2", "--blocks", "inline")
    async with served(tmp_path_factory.mktemp("inline"), *options) as engine:
        yield engine


@tracewire.intervention
def early_only(model, tracer, live):
    """Reads what the first stage alone has."""
    seen = [].save()
    for step in tracer.iter[:]:
        seen.append(model.model.layers[1].output[0][-1].float().clone())


@tracewire.intervention
def follows(model, tracer, live):
    """Reads a live parameter beside a value of each stage."""
    seen = [].save()
    for step in tracer.iter[:]:
        early = model.residual(1).output[-1].float().norm()
        seen.append(float(early + model.residual(6).output[-1].float().norm()))


@tracewire.intervention
def calls_early(model, tracer, live):
    """Calls a module that the last stage does not have."""
    stream = model.residual(6).output[-1:].clone()
    seen = model.model.layers[0].mlp(stream).clone().save()


@pytest.mark.parametrize("name", READS)
async def test_what_is_read_is_as_inline(name: str, hosted: Served, inline: Served) -> None:
    block, options = READS[name]
    found = []
    for engine in (hosted, inline):
        async with engine.client() as client:
            found.append(await outcome(client, await client.models.get("demo", timeout=180), block, **options))
    assert found[0]["status"] == "finished"
    assert found[0]["choices"][0][1]
    assert not same(found[1], found[0])


async def test_many_read_at_once_and_come_and_go(hosted: Served, inline: Served) -> None:
    """Readers of one stage and of both, plain requests and a writer share steps."""
    kinds = [blocks.arithmetic, early_only, None, blocks.reads_in_order, follows, blocks.carried(amount=0.1), None]

    async def all_of(engine: Served) -> dict[int, object]:
        found: dict[int, object] = {}
        async with engine.client() as client:
            model = await client.models.get("demo", timeout=60)

            async def one(number: int) -> None:
                block, prompt = kinds[number % len(kinds)], f"{PROMPT} {number}"
                # A CPU's kernels round by the number of rows, so sampled tokens depend on who shares a step.
                given = [5 + (7 * number + 3 * place) % 500 for place in range(5 + 3 * (number % 9))]
                options = {"max_tokens": len(given), "forced_tokens": given}
                came_to = await outcome(client, model, block, prompt=prompt, **options)
                found[number] = [came_to["status"], came_to["choices"]]

            async with anyio.create_task_group() as group:
                for number in range(21):
                    group.start_soon(one, number)
        return found

    ours, theirs = await all_of(hosted), await all_of(inline)
    assert {status for status, _ in ours.values()} == {"finished"}
    assert not same([theirs[one] for one in sorted(theirs)], [ours[one] for one in sorted(ours)], tolerance=0.02)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in WITHOUT_BLOCKS])
async def test_it_is_as_inline(name: str, hosted: Served, inline: Served) -> None:
    found = []
    for engine in (hosted, inline):
        async with engine.client() as client:
            found.append(await SCENARIOS[name](client, await client.models.get("demo", timeout=60)))
    assert not same(found[1], found[0])


async def test_a_module_of_another_stage_is_not_called(hosted: Served) -> None:
    async with hosted.client() as client:
        came_to = await outcome(client, await client.models.get("demo", timeout=60), calls_early)
    assert came_to["status"] == "failed"
    assert "model.layers.0.mlp is on pipeline stage 0" in came_to["error"][1]


# --- four workers: the last tests -------------------------------------------------------------------------------------

LAYOUTS = {
    "two by two": ("--pipeline-parallel-size", "2", "--tensor-parallel-size", "2"),
    "four stages": ("--pipeline-parallel-size", "4"),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    """The layout of four workers."""
    return request.param


@pytest.fixture(scope="module")
async def workers(starts_engine: None, layout: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """An engine of four workers whose blocks run in hosts."""
    options = (*LAYOUTS[layout], "--blocks", "host")
    async with served(tmp_path_factory.mktemp("workers"), *options, cores="0|1|0|1") as engine:
        yield engine


@pytest.fixture(scope="module")
async def workers_inline(
    starts_engine: None, layout: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    """The same engine, whose blocks run in its workers."""
    options = (*LAYOUTS[layout], "--blocks", "inline")
    async with served(tmp_path_factory.mktemp("inline-workers"), *options, cores="0|1|0|1") as engine:
        yield engine


@pytest.mark.parametrize("name", READS)
async def test_four_workers_read_as_inline(name: str, workers: Served, workers_inline: Served) -> None:
    block, options = READS[name]
    found = []
    for engine in (workers, workers_inline):
        async with engine.client() as client:
            model = await client.models.get("demo", timeout=300)
            found.append(await outcome(client, model, block, **{**options, "max_tokens": 5}))
    assert found[0]["status"] == "finished"
    assert not same(found[1], found[0])


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in WITHOUT_BLOCKS])
async def test_four_workers_come_to_what_they_come_to_inline(
    name: str, layout: str, workers: Served, workers_inline: Served
) -> None:
    found = []
    for engine in (workers, workers_inline):
        async with engine.client() as client:
            found.append(await SCENARIOS[name](client, await client.models.get("demo", timeout=300)))
    if (name, layout) == ("module_calls", "four stages"):
        # The last two blocks call a module of a stage that neither waits nor is the last one.
        for module in ("model.layers.5.mlp is on pipeline stage 2", "model.layers.2.mlp is on pipeline stage 1"):
            assert module in found[0].pop()["error"][1]
            assert found[1].pop()["status"] == "finished"
    assert not same(found[1], found[0])


@tracewire.intervention
def of_all_ranks(model, tracer, live):
    """Reads and changes what the ranks of each stage have a part of, and calls such modules of both stages early."""
    seen = [].save()
    for step in tracer.iter[:]:
        wide = model.model.layers[1].self_attn.qkv_proj.output[0]
        wide[:] *= 1.25
        gate = model.model.layers[1].mlp.down_proj.input
        gate[:] *= 0.5
        stream = model.residual(2).output[-1:].clone()
        seen.append(model.model.layers[2].mlp(stream)[-1].float().clone())
        seen.append(model.logits_processor(model.lm_head, model.model.norm(stream))[-1].float().clone())
        late = model.model.layers[6].mlp.down_proj.input
        late[:] *= 0.75
        seen.append(late.float().clone())


async def test_what_several_ranks_have_a_part_of(workers: Served, workers_inline: Served) -> None:
    """A plain reader goes on beside it."""
    found = []
    for engine in (workers, workers_inline):
        async with engine.client() as client:
            model = await client.models.get("demo", timeout=300)
            async with client.trace(model, PROMPT, blocks.arithmetic, **GREEDY, max_tokens=60) as beside:
                await anext(aiter(beside))
                found.append(await outcome(client, model, of_all_ranks))
                assert (await beside.result()).status == "finished"
    assert found[0]["status"] == "finished", found[0]["error"]
    assert found[0]["choices"][0][1]
    assert not same(found[1], found[0], tolerance=0.02)
