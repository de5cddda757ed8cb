"""Engines whose workers are Ray actors, in a cluster of their own: as on one rank, and nothing of Ray is left after.

Three layouts: two tensor-parallel ranks, with blocks in the workers and in hosts, and two pipeline stages. Each engine
is killed in part, and then outright.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import anyio
import anyio.to_thread
import psutil
import pytest

import tracewire
from tests.support.blocks import parallel as blocks
from tests.support.command_lines import command_line
from tests.support.engine_process import EngineProcess
from tests.support.parallel.layouts import Served, served
from tests.support.parallel.scenarios import GREEDY, PROMPT, SCENARIOS, TIES, check_restarted, outcome, same
from tracewire import Client, Model, Output

pytestmark = pytest.mark.full

LAYOUTS = {
    "tensor parallel": ("--tensor-parallel-size", "2", "--blocks", "inline"),
    "tensor parallel, hosts": ("--tensor-parallel-size", "2", "--blocks", "host"),
    "pipeline": ("--pipeline-parallel-size", "2"),
}

#: How far values may be off: tensor-parallel ranks sum bfloat16 in another order.
TOLERANCES = {"tensor parallel": 0.05, "tensor parallel, hosts": 0.05, "pipeline": 0.02}

#: What a Ray cluster consists of, by what its processes' command lines say.
RAY = re.compile(r"gcs_server|raylet|ray::|/ray/(dashboard|autoscaler|_private)/")


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    """How the two ranks stand to each other."""
    return str(request.param)


@pytest.fixture(scope="module")
async def ranks(starts_engine: None, layout: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """An engine of two Ray actors, with a core each."""
    options = ("--distributed-executor-backend", "ray", "--ray-address", "local", *LAYOUTS[layout])
    async with served(tmp_path_factory.mktemp("ray"), *options) as engine:
        yield engine


@pytest.fixture
async def client(ranks: Served) -> AsyncIterator[Client]:
    """A client of that engine's bus."""
    async with ranks.client() as client:
        yield client


@pytest.fixture
async def two(client: Client) -> Model:
    """Its model."""
    return await client.models.get("demo", timeout=180)


@pytest.mark.parametrize("name", SCENARIOS)
async def test_it_is_as_on_one_rank(
    name: str, layout: str, client: Client, two: Model, engine: EngineProcess, engine_bus: str
) -> None:
    ours = await SCENARIOS[name](client, two)
    if layout != "pipeline" and name in TIES:
        # Rounding decides between tokens there. That it came to its end, each token told once, is all.
        return
    async with tracewire.connect(engine_bus) as other:
        theirs = await SCENARIOS[name](other, await other.models.get("demo", timeout=30))
    assert not same(theirs, ours, tolerance=TOLERANCES[layout])


def processes(engine: EngineProcess, what: re.Pattern[str]) -> list[psutil.Process]:
    """Those below an engine whose command line has this."""
    return [process for process in engine.descendants() if what.search(command_line(process))]


async def test_a_killed_worker_costs_an_attempt(layout: str, client: Client, two: Model, ranks: Served) -> None:
    """The engine is lost with it and starts again, Ray with it, and the trace is the same as undisturbed."""
    undisturbed = await outcome(client, two, blocks.arithmetic, max_tokens=100)
    before = processes(ranks.engine, RAY)
    async with client.trace(two, PROMPT, blocks.arithmetic, **GREEDY, max_tokens=100) as trace:
        async for item in trace:
            if isinstance(item, Output) and item.index >= 4:
                break
        # Neither the one that reports nor EngineCore: nobody who would be missed at once.
        workers = processes(ranks.engine, re.compile("ray::TracewireRayWorker"))
        assert len(workers) == 2
        workers[0 if layout == "pipeline" else 1].kill()
        with anyio.fail_after(240):
            result = await trace.result()
        events = [event async for event in client.subscribe(trace.id, since="start")]
    check_restarted(events)
    assert result.status == "finished"
    assert result.token_ids == undisturbed["choices"][0][0]
    assert not same(undisturbed["choices"][0][1], result.saves, tolerance=TOLERANCES[layout])
    _, alive = await anyio.to_thread.run_sync(psutil.wait_procs, before, 10)
    assert not alive


async def test_killed_outright_it_leaves_nothing(client: Client, two: Model, ranks: Served) -> None:
    """The last test: whoever kills the supervisor wants all of it gone. Ray's agents take their minute."""
    below = ranks.engine.descendants()
    names = " ".join(command_line(process) for process in processes(ranks.engine, RAY))
    for part in ("gcs_server", "raylet", "DashboardAgent", "RuntimeEnvAgent", "TracewireRayWorker"):
        assert part in names
    ranks.engine.process.kill()
    _, alive = await anyio.to_thread.run_sync(psutil.wait_procs, below, 120)
    assert not alive
