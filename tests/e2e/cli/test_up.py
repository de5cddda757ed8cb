"""`tracewire up demo` serves until Ctrl-C, and what it prints works as printed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support import ROOT
from tests.support.command_lines import with_words
from tests.support.engine_process import ENVIRONMENT

PATIENCE = 120
DIRECTION = ROOT / "examples" / "demo_model" / "direction.npy"


class Up:
    """A running `tracewire up demo`, and what it printed."""

    def __init__(self, folder: Path) -> None:
        self.environment = {
            **os.environ,
            **ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        self.environment.pop("TRACEWIRE_URL", None)
        self.errors = folder / "errors"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tracewire.cli", "up", "demo"],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=self.environment,
                # As a shell starts it: a Ctrl-C goes to all processes of its group.
                process_group=0,
            )
        self.lines: list[str] = []

    def wait_ready(self) -> None:
        """Read what it prints up to the last line."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("Ctrl-C ends everything."):
                return
        raise RuntimeError(f"it ended with {self.process.wait()}:\n{self.errors.read_text()[-4000:]}")

    def wait_adapter(self) -> list[psutil.Process]:
        """Wait until the engine's supervisor has started an adapter, and return all processes below the command."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            below = psutil.Process(self.process.pid).children(recursive=True)
            if len(with_words(below, "tracewire_engine.launch")) == 2:
                return below
            time.sleep(0.05)
        raise AssertionError(f"no adapter was started:\n{self.errors.read_text()}")

    def line(self, start: str) -> str:
        """The printed command that begins so."""
        (found,) = [line.strip() for line in self.lines if line.strip().startswith(start)]
        return found

    def shell(self, *commands: str) -> subprocess.CompletedProcess[str]:
        """Type commands into another terminal, after the line that sets TRACEWIRE_URL."""
        script = "\n".join([self.line("export "), *commands])
        done = subprocess.run(
            ["sh", "-c", script], capture_output=True, text=True, env=self.environment, check=False, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr
        return done


@pytest.fixture
def up(starts_engine: None, tmp_path: Path) -> Iterator[Up]:
    """The command, ready."""
    started = Up(tmp_path)
    try:
        started.wait_ready()
        yield started
    finally:
        if started.process.poll() is None:
            started.process.send_signal(signal.SIGTERM)
            started.process.wait(PATIENCE)
        assert started.process.stdout is not None
        started.process.stdout.close()


@pytest.mark.usefixtures("starts_engine")
def test_ctrl_c_while_the_model_loads(tmp_path: Path) -> None:
    started = Up(tmp_path)
    try:
        below = started.wait_adapter()
    finally:
        os.killpg(started.process.pid, signal.SIGINT)
        status = started.process.wait(PATIENCE)
    assert started.process.stdout is not None
    with started.process.stdout as said:
        assert said.read() == ""
    assert status == 0
    assert left_of(below) == []


def left_of(below: list[psutil.Process]) -> list[psutil.Process]:
    """The processes that have not ended with the command.

    A zombie has: it waits until this machine's first process takes note of it, since its parent was gone before.
    """

    def lives(process: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):
            return process.status() != psutil.STATUS_ZOMBIE
        return False

    _, alive = psutil.wait_procs(below, timeout=1)
    return [one for one in alive if lives(one)]


@pytest.mark.full
def test_a_kill_leaves_no_process(up: Up) -> None:
    below = psutil.Process(up.process.pid).children(recursive=True)
    up.process.kill()
    up.process.wait()
    _, alive = psutil.wait_procs(below, timeout=PATIENCE)
    assert alive == []


def test_up_demo(up: Up) -> None:
    assert up.lines[0].startswith("ready: demo after ")
    assert up.line("dashboard ").endswith("/dashboard")
    answer = json.loads(up.shell(up.line("curl ")).stdout)
    assert answer["model"] == "demo"
    assert answer["usage"]["completion_tokens"] == 32
    assert answer["choices"][0]["text"]

    text = up.shell(up.line("tracewire run ")).stdout
    assert len(text) > 20

    steer, probe = f"residual(4)@{DIRECTION}*alpha=6", f"projection=residual(4)@{DIRECTION}"
    lens = "lens=residual(*),top_k=2"
    options = f"--steer '{steer}' --probe '{probe}' --lens '{lens}' --max-tokens 8 --ignore-eos --json"
    lines = up.shell(f"tracewire run demo 'This module' {options}").stdout.splitlines()
    events = [json.loads(line) for line in lines]
    trace_id = events[0]["trace_id"]
    outputs = [event for event in events if event["type"] == "output"]
    assert sum(len(output["delta"]["projection"]) for output in outputs) == 8
    assert outputs[0]["delta"]["lens"][0]["token_strings"]
    assert events[1]["live"] == {"alpha": 6.0}
    assert events[-1]["status"] == "finished"

    shown = up.shell(
        f"tracewire state {trace_id}", f"tracewire export {trace_id} --to '{up.errors.parent}/a.safetensors'"
    )
    assert "save\t0.0\tprojection\t8 items" in shown.stdout
    found = json.loads(up.shell("tracewire doctor --json").stdout)
    assert found["ok"], found
    assert "test trace on demo" in {one["check"] for one in found["findings"]}
    chat = up.shell("echo 'What is a list?' | tracewire chat demo --max-tokens 8")
    assert chat.stdout.strip()

    below = psutil.Process(up.process.pid).children(recursive=True)
    assert len(below) >= 4
    os.killpg(up.process.pid, signal.SIGINT)
    assert up.process.wait(PATIENCE) == 0
    assert left_of(below) == []
    socket = Path(up.line("export ").partition("unix://")[2])
    assert socket.name == "redis.sock"
    assert not socket.parent.exists()
