"""The processes of `tracewire up`."""

# ruff: noqa: ASYNC110, ASYNC220
from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import psutil
import pytest

from tracewire.cli.children import Child

PATIENCE = 60
#: A process that starts a `tracewire redis` child, says its id, and waits.
PARENT = """
import sys, time
from pathlib import Path
from tracewire.cli.children import Child
print(Child("redis", [], {}, Path(sys.argv[1])).pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _same_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children import what this process imports."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))


async def until(condition: Callable[[], object]) -> None:
    with anyio.fail_after(PATIENCE):
        while not condition():
            await anyio.sleep(0.02)


async def test_a_child_says_when_it_is_ready_and_stops(redis_url: str, tmp_path: Path) -> None:
    environment = {"TRACEWIRE_URL": redis_url}
    child = Child("gateway", ["--port", "0", "--drain", "0"], environment, tmp_path / "log")
    try:
        await until(lambda: child.answer or child.status is not None)
        assert child.answer.startswith("http://127.0.0.1:")
        assert os.getsid(child.pid) == child.pid
    finally:
        await child.stop(PATIENCE)
    assert child.status == 0
    # A second call does nothing.
    await child.stop(0)


async def test_the_log_says_why_a_child_ended(tmp_path: Path) -> None:
    child = Child("gateway", ["--port", "x"], {}, tmp_path / "log")
    await until(lambda: child.status is not None)
    assert (child.status, child.answer) == (2, "")
    assert "argument --port" in child.log_tail()
    assert child.progress() == ""
    (tmp_path / "log").write_text("weights:  10%|#  | 1/9\rweights:  45%|## | 4/9\nand more\n")
    assert child.progress() == "weights:  45%|## | 4/9"
    # Why there are attempts, and not when the next one comes.
    hub = "2026-01-02 03:04:05,678 hub WARNING"
    (tmp_path / "log").write_text(f"a:  10%\n{hub} no answer from the hub\n{hub} Retrying in 4s\nand more\n")
    assert child.progress() == "hub WARNING no answer from the hub"
    (tmp_path / "log").write_text("(EngineCore pid=7) INFO 01-02 03:04:05 [cpu.py:317] Loading weights\n")
    assert child.progress() == "Loading weights"
    assert Child("nothing", [], {}, None).log_tail() == ""


async def test_a_child_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    child = Child("redis", [], {}, tmp_path / "log")
    await until(lambda: psutil.Process(child.pid).children())
    os.kill(child.pid, signal.SIGSTOP)
    await child.stop(0)
    assert child.status == -signal.SIGKILL


async def test_a_child_is_killed_when_the_wait_for_its_end_is_cancelled(tmp_path: Path) -> None:
    child = Child("redis", [], {}, tmp_path / "log")
    await until(lambda: psutil.Process(child.pid).children())
    os.kill(child.pid, signal.SIGSTOP)
    async with anyio.create_task_group() as group:
        group.start_soon(child.stop, PATIENCE)
        await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    assert child.status == -signal.SIGKILL


async def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(await anyio.to_thread.run_sync(parent.stdout.readline)))
    await until(child.children)
    below = [child, *child.children(recursive=True)]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, alive = await anyio.to_thread.run_sync(psutil.wait_procs, below, PATIENCE)
    assert alive == []
