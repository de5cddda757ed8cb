"""The tutorial's and the how-tos' code runs as it stands, on a scripted engine.

`tests/e2e/tracing/test_howto.py` runs it on a real one, and `make lint` checks the types of the whole programs.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import httpx
import ml_dtypes
import numpy as np
import pytest
from inspect_ai.log import read_eval_log_async

import tracewire
from tests.examples.test_examples import module_of
from tests.faults.harness.processes import free_port
from tests.support import ROOT, gateways
from tests.support.bus_engine import BusEngine, engine_info
from tests.support.cells import blocks, run_cell, run_page
from tests.support.page_engine import HIDDEN, LAYERS, played
from tests.support.until import until
from tracewire_bus.transport.embedded import EmbeddedServer
from tracewire_bus.wire.packing import unpack

DOCS = ROOT / "docs"
HOWTO = DOCS / "howto"
PATIENCE = 60

#: The pages whose code is cells, with what stands in their scope as they begin.
CELLS = {"notebook": (), "print": ("client",), "bfloat16": ("client",), "typing": ()}
#: The pages whose code is one whole program.
PROGRAMS = ("fastapi", "script")


@pytest.fixture
async def url(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """URL of a Redis of the test's own, which programs find in their environment."""
    async with EmbeddedServer.start() as server:
        monkeypatch.setenv("TRACEWIRE_URL", server.url)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        yield server.url


def engine(url: str) -> Any:
    """An engine of the model that the pages ask for."""
    info = engine_info("demo", layer_count=LAYERS, hidden_size=HIDDEN, max_model_len=2048)
    return BusEngine.running(url, "tw", played, info)


def program(page: str, folder: Path) -> Path:
    """The program of a page as a file."""
    (code,) = blocks(HOWTO / f"{page}.md", "python")
    path = folder / f"{page}.py"
    path.write_text(code)
    return path


def test_each_page_with_code_is_run() -> None:
    with_code = {page.stem for page in HOWTO.glob("*.md") if blocks(page, "python")}
    assert with_code == {*CELLS, *PROGRAMS, "inspect"}


async def test_the_tutorial(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    async with engine(url), gateways.serving(url, "tw") as served:
        values = await run_page(DOCS / "tutorial.md", scope, redis=url, gateway=served.url)
    (table,) = [value for value in values if value is not None and hasattr(value, "columns")]
    assert list(table.columns) == ["token_id", "projection"]
    assert len(table) == 500
    said = capsys.readouterr().out
    assert f"{LAYERS} layers of {HIDDEN}" in said
    assert f"(16, {HIDDEN})" in said
    (change,) = [line for line in said.splitlines() if line.startswith("steered from token ")]
    assert int(change.split()[3]) > 20
    assert scope["newest"].trace_id == scope["trace"].id
    assert scope["result"].live_version == 1


@pytest.mark.parametrize("page", CELLS)
async def test_a_page_of_cells(page: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    async with engine(url), tracewire.connect(url) as client:
        scope: dict[str, Any] = {"tracewire": tracewire, **({"client": client} if CELLS[page] else {})}
        values = await run_page(HOWTO / f"{page}.md", scope, redis=url)
        said = capsys.readouterr().out
        match page:
            case "notebook":
                assert list(values[2]["norms"]) == [1.5] * 8
                assert "logits" in scope["result"].saves
            case "print":
                assert said.splitlines() == ["a line"] * 3
            case "bfloat16":
                assert said.splitlines() == [f"torch.bfloat16 (4, {HIDDEN})", f"float32 (4, {HIDDEN})", "bfloat16"]
            case "typing":
                assert await scope["run"](client, "hello") == [0.5] * 4


def test_what_the_page_says_of_bfloat16() -> None:
    rows = np.linspace(0, 3, 4096).astype(ml_dtypes.bfloat16)
    assert np.array_equal(rows.astype(np.float32).astype(ml_dtypes.bfloat16), rows)
    assert abs(float(rows.sum()) - float(rows.astype(np.float32).sum())) > 1


async def test_the_script(url: str, tmp_path: Path) -> None:
    run = partial(subprocess.run, capture_output=True, text=True, timeout=PATIENCE)
    async with engine(url):
        done = await anyio.to_thread.run_sync(run, [sys.executable, str(program("script", tmp_path)), "hello"])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == " word" * 32 + "\n32 tokens, finished\n"


async def test_the_service(url: str, tmp_path: Path) -> None:
    service = module_of(program("fastapi", tmp_path))
    transport = httpx.ASGITransport(service.app)
    async with service.lifespan(service.app), httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        answer = await http.post("/traces", params={"prompt": "hello"})
        assert answer.status_code == 503
        assert "no engine serves the model 'demo'" in answer.json()["detail"]
        assert (await http.get("/traces/nope/events")).status_code == 404
        async with engine(url):
            started = await http.post("/traces", params={"prompt": "hello"})
            assert started.status_code == 202
            path = f"/traces/{started.json()['trace_id']}/events"
            answer = await http.get(path)
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [dict(line.split(": ", 1) for line in one.splitlines()) for one in answer.text.split("\n\n") if one]
        data = [json.loads(event["data"]) for event in events]
        assert "".join(one.get("text", "") for one in data) == " word" * 64
        assert data[-1] == {"type": "final", "status": "finished"}
        again = await http.get(path, headers={"Last-Event-ID": events[9]["id"]})
        assert again.text == answer.text.split("\n\n", 10)[10]


async def test_the_service_s_commands(url: str, tmp_path: Path) -> None:
    program("fastapi", tmp_path).rename(tmp_path / "service.py")
    (shell,) = blocks(HOWTO / "fastapi.md", "")
    port = free_port()
    _, _, serve, start, follow = [line.partition("  #")[0].replace("8000", str(port)) for line in shell.splitlines()]
    bin_first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    given = {"cwd": tmp_path, "env": {**os.environ, "PATH": bin_first}}
    said = partial(anyio.run_process, **given)
    serving = await anyio.open_process(f"exec {serve}", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **given)
    try:
        async with engine(url), httpx.AsyncClient() as http:

            async def serves() -> bool:
                assert serving.returncode is None
                try:
                    return (await http.get(f"http://localhost:{port}/docs")).is_success
                except httpx.TransportError:
                    return False

            await until(serves)
            trace_id = json.loads((await said(start)).stdout)["trace_id"]
            assert (
                b'data: {"type": "final", "status": "finished"}'
                in (await said(follow.replace("TRACE_ID", trace_id))).stdout
            )
    finally:
        serving.terminate()
        await serving.wait()


async def test_the_evaluation(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("direction.npy", np.ones(HIDDEN, np.float32))
    task, cell = blocks(HOWTO / "inspect.md", "python")
    (tmp_path / "task.py").write_text(task)
    _, command = blocks(HOWTO / "inspect.md", "")
    words = shlex.split(command.replace("redis://localhost:6379", url))
    words = [str(Path(sys.executable).parent / words[0]), *words[1:], "--display", "none"]
    run = partial(subprocess.run, [sys.executable, *words], capture_output=True, text=True, timeout=PATIENCE)
    async with engine(url) as serving:
        done = await anyio.to_thread.run_sync(run)
        assert (done.returncode, done.stderr) == (0, "")
        (path,) = (tmp_path / "logs").iterdir()
        log = await read_eval_log_async(str(path))
        assert (log.status, log.results.scores[0].metrics["mean"].value) == ("success", 0.5)
        for sample in log.samples:
            assert sample.output.completion == " word" * 32
            rows = (await tracewire.inspect.saves(sample.output))["rows"]
            found = sample.scores["projection"].metadata["norm"]
            assert found == pytest.approx(np.linalg.norm(np.asarray(rows[-1], np.float32)), rel=1e-3)
        assert {type(one).__name__ for one in serving.taken[0].interventions} == {"Steer", "Probe"}
        await run_cell(cell, "<cell>", {"np": np, "tracewire": tracewire})
        assert [unpack(one.live) for one in serving.taken[2:]] == [{"alpha": 0.0}, {"alpha": 8.0}]
    assert capsys.readouterr().out == f"0.0 {[0.5] * 8}\n8.0 {[0.5] * 8}\n"


async def test_a_cell_that_fails_is_seen() -> None:
    with pytest.raises(ZeroDivisionError):
        await run_cell("await anyio.sleep(0)\n1 / 0", "<cell>", {"anyio": anyio})
