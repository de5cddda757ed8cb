"""Pausing on the real engine: what is paused rests, what is resumed goes on as if nothing had been, the others run.

The engine, with few KV blocks and few places, and the adapter in front of it are in this process; the tests pause
behind the adapter's back.
"""

# mypy: ignore-errors

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import anyio
import numpy as np
import psutil
import pytest

import tracewire
from tests.support.blocks import tracing as blocks
from tests.support.command_lines import with_words
from tests.support.engine_inside import counts, engine_inside, forgotten
from tracewire import Client, Model, Output
from tracewire_bus.wire.messages import Probe

PROMPT = "def add(a, b):\n    return"
GREEDY = {"temperature": 0.0, "ignore_eos": True}
PLACES, BLOCKS, BLOCK_SIZE, LENGTH = 3, 20, 32, 512


@tracewire.intervention
def reads(model, tracer, live):
    """A vector a step, in no hurry: what is read of it here is near to where it is."""
    hidden = [].save()
    for step in tracer.iter[:]:
        hidden.append(model.model.layers[2].output[0][-1].clone())
        time.sleep(0.005)


@tracewire.intervention
def edits(model, tracer, live):
    """The same, and all of a step's tokens are changed."""
    hidden = [].save()
    for step in tracer.iter[:]:
        model.model.layers[4].output[0][:] *= 0.5
        hidden.append(model.model.layers[4].output[0][-1].clone())
        time.sleep(0.005)


@pytest.fixture(scope="module")
async def served(starts_engine: None) -> AsyncIterator[tuple[Any, str]]:
    """The engine, which notes the names of the requests that it is given, and the URL of the Redis that it serves."""
    options = {"max_num_seqs": PLACES, "max_model_len": LENGTH}
    async with engine_inside(**options, block_size=BLOCK_SIZE, num_gpu_blocks_override=BLOCKS) as served:
        yield served


@pytest.fixture
async def engine(served: tuple[Any, str]) -> AsyncIterator[Any]:
    """The engine, which holds nothing when the test begins and nothing when it has ended."""
    yield served[0]
    while served[0].started:
        await served[0].abort(served[0].started.pop())
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


class Running:
    """A trace under way, whose outputs are read as they come."""

    def __init__(self, trace: Any, name: str) -> None:
        self.trace, self.name = trace, name
        self.tokens: list[int] = []
        self.seen: dict[int, int] = {}
        self.changed = asyncio.Event()
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for item in self.trace:
            if isinstance(item, Output):
                self.seen[item.choice] = item.index + len(item.token_ids)
                self.changed.set()

    def count(self, choice: int = 0) -> int:
        return self.seen.get(choice, 0)

    async def until(self, count: int) -> None:
        with anyio.fail_after(30):
            while self.count() < count:
                self.changed.clear()
                await self.changed.wait()

    async def rest(self) -> None:
        """Wait until no output has come for a while, which is long on a busy machine."""
        quiet = 0
        while quiet < 4:
            before = dict(self.seen)
            await anyio.sleep(0.4)
            quiet = quiet + 1 if before == self.seen else 0

    async def result(self) -> Any:
        with anyio.fail_after(60):
            await self.reading
            return await self.trace.result()


async def start(engine: Any, client: Client, model: Model, block: Any = None, **options: Any) -> Running:
    prompt = options.pop("prompt", PROMPT)
    trace = client.trace(model, prompt, block, detach=True, **{**GREEDY, **options})
    count = len(engine.started)
    await trace.start()
    await trace.accepted()
    assert len(engine.started) == count + 1
    return Running(trace, engine.started[-1])


def same(ours: Any, theirs: Any) -> None:
    """Equal tokens, and saves that are equal but for what another composition of the batch makes of them."""
    assert ours.token_ids == theirs.token_ids
    assert ours.saves.keys() == theirs.saves.keys()
    for name, items in theirs.saves.items():
        assert len(ours.saves[name]) == len(items)
        for one, other in zip(ours.saves[name], items, strict=True):
            one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
            assert one.shape == other.shape
            np.testing.assert_allclose(one, other, rtol=0.05, atol=0.05 * np.abs(other).max())


async def test_one_rests_and_another_goes_on(engine: Any, client: Client, model: Model) -> None:
    options = {"max_tokens": 150, "interventions": [Probe("probed", "residual(3)")]}
    alone = await (await start(engine, client, model, reads, **options)).result()
    one = await start(engine, client, model, reads, **options)
    await one.until(8)
    other = await start(engine, client, model, blocks.two_names, max_tokens=400, prompt="import os\n")
    await other.until(8)
    assert await engine.pause(one.name)
    await one.rest()
    held, gone = one.count(), other.count()
    assert held < 150
    await other.until(gone + 50)
    assert one.count() == held
    assert await engine.resume(one.name)
    assert not await engine.resume(one.name)
    same(await one.result(), alone)
    assert len((await other.result()).token_ids) == 400


async def test_an_engine_of_paused_requests_idles_and_has_told_all(engine: Any, client: Client, model: Model) -> None:
    alone = await (await start(engine, client, model, reads, max_tokens=40)).result()
    one = await start(engine, client, model, reads, max_tokens=40)
    await one.until(5)
    await engine.pause(one.name)
    steps = (await counts(engine))["steps"]
    await one.rest()
    assert (await counts(engine))["steps"] == steps
    held = one.count()
    (core,) = with_words(psutil.Process().children(), "EngineCore")
    processes = [core, *core.children(recursive=True)]
    assert with_words(processes, "Worker")

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    # vLLM's own queues are polled for a second after the last message.
    await anyio.sleep(1.5)
    before = used()
    await anyio.sleep(2)
    assert used() - before < 0.3
    assert one.count() == held
    # It answers meanwhile, and others run as ever.
    assert await engine.tracked() == 1
    assert len((await (await start(engine, client, model, max_tokens=10)).result()).token_ids) == 10
    await engine.resume(one.name)
    same(await one.result(), alone)


async def test_a_paused_request_can_be_aborted(engine: Any, client: Client, model: Model) -> None:
    one = await start(engine, client, model, reads, max_tokens=400)
    await one.until(5)
    await engine.pause(one.name)
    await one.rest()
    await engine.abort(one.name)
    with pytest.raises(tracewire.TraceFailed, match="abort"):
        await one.result()
    await forgotten(engine)
    assert not await engine.pause(one.name)
    assert not await engine.resume(one.name)


async def test_all_choices_are_paused(engine: Any, client: Client, model: Model) -> None:
    options = {"max_tokens": 60, "n": 2, "temperature": 0.8, "seed": 7}
    alone = await (await start(engine, client, model, reads, **options)).result()
    one = await start(engine, client, model, reads, **options)
    await one.until(5)
    await engine.pause(one.name)
    await one.rest()
    held = dict(one.seen)
    await anyio.sleep(0.5)
    assert one.seen == held
    assert all(0 < count < 60 for count in held.values())
    await engine.resume(one.name)
    result = await one.result()
    for ours, theirs in zip(result.invokes[0].choices, alone.invokes[0].choices, strict=True):
        same(ours, theirs)


async def test_a_waiting_request_stays_waiting(engine: Any, client: Client, model: Model) -> None:
    # Long enough to be there still when it is paused, however busy the machine.
    running = [await start(engine, client, model, max_tokens=400) for _ in range(PLACES)]
    waiting = await start(engine, client, model, reads, max_tokens=10)
    await engine.pause(waiting.name)
    for one in running:
        assert len((await one.result()).token_ids) == 400
    await anyio.sleep(0.3)
    assert waiting.count() == 0
    await engine.resume(waiting.name)
    assert len((await waiting.result()).token_ids) == 10


@pytest.mark.parametrize(
    "block", [pytest.param(reads, marks=pytest.mark.full, id="that reads"), pytest.param(edits, id="that edits")]
)
async def test_paused_requests_give_their_blocks_up_and_are_computed_anew(
    engine: Any, client: Client, model: Model, block: Any
) -> None:
    options = {"max_tokens": 320, "interventions": [Probe("probed", "residual(3)")]}
    alone = await (await start(engine, client, model, block, **options)).result()
    one = await start(engine, client, model, block, **options)
    await one.until(160)
    await engine.pause(one.name)
    await one.rest()
    held = one.count()
    assert held < 320
    # In the end 14 of the 19 blocks: not beside the 6 and more that the paused one has.
    began = time.monotonic()
    other = await start(engine, client, model, max_tokens=430)
    assert len((await other.result()).token_ids) == 430
    assert time.monotonic() - began < 30
    assert one.count() == held
    await engine.resume(one.name)
    same(await one.result(), alone)


async def test_a_held_engine_makes_no_tokens_and_goes_on(engine: Any, client: Client, model: Model) -> None:
    """All of it, whatever was paused by name; what is aborted meanwhile ends."""
    running = [await start(engine, client, model, block, max_tokens=150) for block in (None, reads)]
    gone = await start(engine, client, model, max_tokens=400)
    for one in (*running, gone):
        await one.until(5)
    await engine.pause_all()
    for one in (*running, gone):
        await one.rest()
    held = [one.count() for one in running]
    assert max(held) < 150
    await client.cancel(gone.trace.id)
    with pytest.raises(tracewire.TraceFailed):
        await gone.result()
    try:
        late = await start(engine, client, model, max_tokens=10)
        assert [one.count() for one in running] == held
        assert not late.count()
    finally:
        await engine.resume_all()
    for one in (*running, late):
        assert len((await one.result()).token_ids) == (10 if one is late else 150)
