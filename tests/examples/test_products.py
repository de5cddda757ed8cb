"""Each program of `examples/products` runs as its user would run it, on the real engine, and does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import tracewire
from tests.support.gateways import serving
from tests.support.until import until

PRODUCTS = Path(__file__).resolve().parents[2] / "examples" / "products"
PATIENCE = 120


@pytest.fixture
def environment(engine: Any, engine_bus: str) -> dict[str, str]:
    """The environment of programs that use the shared engine."""
    path = os.pathsep.join(path for path in sys.path if path)
    return {**os.environ, "TRACEWIRE_URL": engine_bus, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


async def ran(environment: dict[str, str], program: str, *arguments: str) -> str:
    """What a program prints."""
    command = [sys.executable, str(PRODUCTS / program), *arguments]
    run = partial(subprocess.run, command, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    done = await anyio.to_thread.run_sync(run)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_each_product_is_on_its_page_and_tested() -> None:
    page, tests = (PRODUCTS / "README.md").read_text(), Path(__file__).read_text()
    for program in PRODUCTS.glob("*.py"):
        if program.name != "common.py":
            assert f"({program.name})" in page
            assert f'"{program.name}"' in tests


async def test_the_lens_shows_each_layer_s_token(environment: dict[str, str]) -> None:
    header, *rows = (await ran(environment, "lens.py", "def parse(text):")).splitlines()
    assert header.split() == ["token", "|", *map(str, range(8))]
    assert len(rows) == 16
    # Greedy: the last layer's likeliest token is the one that was sampled.
    assert all(row[:12] == row[-12:] for row in rows)


@pytest.mark.full
async def test_patching_recovers_more_from_layer_to_layer(environment: dict[str, str]) -> None:
    found = [float(one) for one in re.findall(r"layer \d: +(-?[\d.]+)", await ran(environment, "patching.py"))]
    assert len(found) == 8
    assert found[0] < 0.5
    assert found[-1] == pytest.approx(1, abs=0.05)


@pytest.mark.full
async def test_monitors_and_their_controller(environment: dict[str, str]) -> None:
    said = (await ran(environment, "monitors.py", "This module provides")).splitlines()
    changes = [line for line in said if line.startswith("controller: ")]
    assert changes[0].endswith("alpha 20")
    lines = int(re.match(r"(\d+) lines, mean", said[len(changes)])[1])
    assert (lines >= 4) == (len(changes) > 1)


@pytest.mark.full
async def test_the_agent_changes_its_own_mind(environment: dict[str, str]) -> None:
    rows = re.findall(r"(-?[\d.]+) wants (\w+) +alpha +(-?[\d.]+)", await ran(environment, "agent.py"))
    assert {mood for _, mood, _ in rows} == {"prose", "code"}
    assert max(float(alpha) for _, mood, alpha in rows if mood == "code") > 0
    assert min(float(alpha) for _, mood, alpha in rows if mood == "prose") < 0


@pytest.mark.full
@pytest.mark.parametrize("reply", ["yes", "no"])
async def test_the_guard_pauses_and_asks(environment: dict[str, str], reply: str) -> None:
    said = await ran(environment, "guard.py", f"--{reply}", "--limit", "2")
    assert "paused at token" in said
    assert ("steered to prose" in said) == (reply == "no")
    assert "the trace was paused" in said
    assert "the trace was resumed" in said


async def test_an_answer_of_openai_s_client_is_steered_by_http(environment: dict[str, str], engine_bus: str) -> None:
    async with serving(engine_bus, "tw") as served, tracewire.connect(engine_bus) as client:
        said = await ran(environment | {"OPENAI_BASE_URL": f"{served.url}/v1"}, "steered_answer.py")
        head, text = said.split("\n", 1)
        trace_id = head.removeprefix("trace ")
        remark = re.compile(r"\n--- (\w+) steers to \{'alpha': 20\.0\} from token (\d+)\n")
        (change,) = remark.findall(text)
        # The same token as a consumer of the SDK's reads, and the same text but for the line in between.
        steered = [one async for one in client.subscribe(trace_id) if one.type == "steered"]
        assert [(one.changes[-1].by, str(one.first_token())) for one in steered] == [change]
        assert int(change[1]) > 16
        state = await client.get_state(trace_id)
    assert remark.sub("", text) == f"This module provides{state.text}\n"
    # Steered to code, it has more of the direction.
    code, first = state.saves["code"], int(change[1])
    assert sum(code[first:]) / len(code[first:]) > sum(code[:first]) / first + 10


@pytest.mark.full
async def test_a_harvest_for_an_autoencoder(environment: dict[str, str], tmp_path: Path) -> None:
    said = (await ran(environment, "autoencoder.py", str(tmp_path / "acts"))).splitlines()
    assert re.fullmatch(r"50 prompts, \d+ rows of 256", said[0])
    first, *_, last = [float(line.partition("variance ")[2].partition(",")[0]) for line in said[1:]]
    assert last < first / 3


@pytest.mark.full
async def test_the_safety_monitor_cancels_code_and_lets_prose_be(environment: dict[str, str], engine_bus: str) -> None:
    command = [sys.executable, str(PRODUCTS / "safety_monitor.py"), "12"]
    monitor = await anyio.open_process(command, env=environment, stderr=None)
    assert monitor.stdout is not None
    said = b""

    async def listen() -> None:
        nonlocal said
        async for piece in monitor.stdout:
            said += piece

    async with tracewire.connect(engine_bus) as client, anyio.create_task_group() as group:
        group.start_soon(listen)
        try:
            with anyio.fail_after(PATIENCE):
                await until(lambda: b"watching" in said)
                code = client.trace("demo", "import os\n\nclass A:\n    def f(self):", max_tokens=400, ignore_eos=True)
                with pytest.raises(tracewire.TraceCancelled, match="the safety monitor read"):
                    await code.result()
                prose = client.trace("demo", "The weather in the north is", max_tokens=8)
                assert (await prose.result()).status == "finished"
                await until(lambda: f"cancelled {code.id}".encode() in said)
        finally:
            monitor.kill()
            await monitor.wait()
            await client.edits("demo").clear()
        group.cancel_scope.cancel()
