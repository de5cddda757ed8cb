"""Each program of `examples/programs` runs as its user would run it, on a scripted engine, and its types are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest

import tracewire
from tests.examples.test_examples import module_of
from tests.support import gateways, typecheck
from tests.support.bus_engine import BusEngine, Script, Stage, engine_info, tiny
from tests.support.cells import run_cell
from tests.support.redis.proxy import proxy
from tracewire_bus.transport.embedded import EmbeddedServer
from tracewire_bus.wire.messages import Failure

PROGRAMS = typecheck.PROGRAMS
PATIENCE = 60


@pytest.fixture
async def url(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """URL of a Redis of the test's own, which programs find in their environment."""
    async with EmbeddedServer.start() as server:
        monkeypatch.setenv("TRACEWIRE_URL", server.url)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        yield server.url


def serving(url: str, script: Script = tiny) -> Any:
    """An engine of the model that programs ask for."""
    return BusEngine.running(url, "tw", script, engine_info("demo"))


async def ran(program: str, *arguments: str) -> str:
    """What a program prints."""
    command = [sys.executable, str(PROGRAMS / program), *arguments]
    run = partial(subprocess.run, command, capture_output=True, text=True, timeout=PATIENCE)
    done = await anyio.to_thread.run_sync(run)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_each_program_is_short() -> None:
    programs = [*PROGRAMS.glob("*.py"), *PROGRAMS.glob("*.ipynb")]
    assert len(programs) >= 10
    for program in programs:
        text = "\n".join(typecheck.cells(program)) if program.suffix == ".ipynb" else program.read_text()
        assert len(text.splitlines()) < 30, program.name
        assert f"({program.name})" in (PROGRAMS / "README.md").read_text()


def test_the_programs_types_are_right_for_mypy_and_pyright(capsys: pytest.CaptureFixture[str]) -> None:
    assert typecheck.main() == 0, capsys.readouterr().out


def test_both_type_checkers_see_a_keyword_that_there_is_not(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import tracewire\n\ndef f(client: tracewire.Client) -> None:\n    client.trace('m', 'a', dedline=3)\n"
    )
    said = typecheck.check([wrong], tmp_path)
    assert "[call-overload]" in said or "[call-arg]" in said
    assert 'No parameter named "dedline"' in said or "reportCallIssue" in said


async def test_the_script(url: str) -> None:
    async with serving(url):
        assert (await ran("script.py", "hello")).splitlines()[0] == "one two three"


async def test_the_notebook(url: str) -> None:
    """Its cells one after the other, in a loop that runs."""

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("one", {"norms": 1.5})
        await stage.final()

    scope: dict[str, Any] = {"__name__": "__main__"}
    values = []
    async with serving(url, script):
        for number, cell in enumerate(typecheck.cells(PROGRAMS / "notebook.ipynb")):
            values.append(await run_cell(cell, f"<cell {number}>", scope))
    assert values[0] == 4
    assert [1.5] in values


async def test_the_web_service(url: str) -> None:
    web = module_of(PROGRAMS / "web.py")
    transport = httpx.ASGITransport(web.app)
    async with web.lifespan(web.app), httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        assert (await http.post("/complete", params={"prompt": "hello"})).status_code == 503
        async with serving(url):
            answer = await http.post("/complete", params={"prompt": "hello"})
        assert (answer.status_code, answer.text) == (200, "one two three")
    with pytest.raises(tracewire.ClientClosed):
        await web.client.models.list()


async def test_the_thread_pool(url: str) -> None:
    async with serving(url) as engine:
        said = await ran("threads.py", *(f"prompt {number}" for number in range(6)))
        assert said.splitlines() == [f"prompt {number}: one two three" for number in range(6)]
        assert len(engine.taken) == 6


async def test_the_nursery_of_trio(url: str) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        if stage.submission.invokes[0].prompt == "slow":
            await anyio.sleep_forever()
        await stage.output("won")
        await stage.final()

    async with serving(url, script):
        assert await ran("nursery.py", "slow", "fast") == "fast: won\n"


async def test_the_workers(url: str) -> None:
    async with serving(url) as engine:
        said = await ran("worker.py", "a", "b", "c")
        assert [line.split(": ")[1] for line in said.splitlines()] == ["one two three"] * 3
        assert {line.split(": ")[0] for line in said.splitlines()} == {one.trace for one in engine.taken}


async def test_the_bot_goes_on_after_an_outage(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    going = anyio.Event()

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output("one")
        await going.wait()
        await stage.output(" two")
        await stage.final()

    bookmark = tmp_path / "bookmark"
    async with (
        serving(url, script),
        tracewire.connect(url) as client,
        client.trace("demo", "hello", trace_id="followed") as trace,
        proxy(url, tmp_path) as through,
    ):
        monkeypatch.setenv("TRACEWIRE_URL", through.url)
        command = [sys.executable, str(PROGRAMS / "bot.py"), trace.id, str(bookmark)]
        async with await anyio.open_process(command) as bot:
            assert bot.stdout is not None
            said = b""
            while b"one" not in said:
                said += await bot.stdout.receive()
            await through.cut()
            going.set()
            with anyio.fail_after(PATIENCE):
                async for more in bot.stdout:
                    said += more
                assert await bot.wait() == 0
    assert said == b"one two"
    assert bookmark.read_text()


async def test_the_batch(url: str, tmp_path: Path) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        if stage.submission.invokes[0].prompt == "bad":
            await stage.final("failed", Failure(type="Test", message="no"))
        else:
            await stage.output("good")
            await stage.final()

    prompts, results = tmp_path / "prompts", tmp_path / "results"
    prompts.write_text("".join(f"{'bad' if number == 7 else number}\n" for number in range(40)))
    async with serving(url, script):
        await ran("batch.py", str(prompts), str(results))
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert [one["prompt"] for one in found] == prompts.read_text().splitlines()
    assert [one.get("text") for one in found] == [None if number == 7 else "good" for number in range(40)]
    assert "failed: Test: no" in found[7]["error"]


async def test_the_monitor_s_alarm(url: str) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.final("failed", Failure(type="Test", message="no"))

    async with serving(url, script), tracewire.connect(url) as client:
        traces = [client.trace("demo", "hello") for _ in range(5)]
        for trace in traces:
            assert await trace.until_done() == "failed"
        async with await anyio.open_process([sys.executable, str(PROGRAMS / "monitor.py")]) as monitor:
            assert monitor.stdout is not None
            with anyio.fail_after(PATIENCE):
                said = (await monitor.stdout.receive()).decode()
            monitor.terminate()
    assert said.startswith("alarm: 5 of 5 failed, the last is ")


async def test_the_steering_loop(url: str) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        for number in range(3):
            await stage.save(f" {number}", {"seen": float(number)})
            await stage.steered()
        await stage.final()

    async with serving(url, script):
        said = (await ran("steering.py")).splitlines()
    assert said[0] == "version 1 from token 1 on: alpha 2.00"


async def test_over_http_one_client_steers_the_answer_of_another(url: str) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output("one")
        # As long as the other client has not steered it.
        await stage.steered()
        await stage.tell()
        await stage.output(f" kept {stage.live['keep']}")
        await stage.final()

    async with serving(url, script), gateways.serving(url, "tw") as served:
        assert await ran("over_http.py", served.url, "hello") == "one kept 0.5"
