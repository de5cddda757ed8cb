"""A real engine for the tests: one `tracewire engine demo` process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import tracewire
from tests.support import ROOT
from tests.support.blocks import tracing as blocks
from tests.support.failed_tasks import failed_tasks
from tests.support.runners import runner_options

__all__ = [
    "BLOB_THRESHOLD",
    "ENVIRONMENT",
    "SECRET",
    "TEMPLATE",
    "EngineProcess",
    "check_expected",
    "expect_engines",
    "is_asked_for",
    "is_worker",
    "left_running",
    "looked_at_inside",
    "running_engine",
    "started_engine",
    "with_blocks",
]

#: The engine under test runs as bit-stable as a CPU allows.
ENVIRONMENT = {"VLLM_CPU_ATTN_SPLIT_KV": "0"}

#: What the shared engine is given in its URL and environment, and shows nobody.
SECRET = "sesame-4711"

#: The shared engine's chat template: the model's own, and behind it what a chat gives as `prefill`.
TEMPLATE = (
    "{% for message in messages %}# {{ message['role'] }}:\n{{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:\n{% endif %}{{ prefill or '' }}"
)

#: Saved arrays of more bytes than this are references, on the shared engine.
BLOB_THRESHOLD = 65536


#: Where the engines under test run blocks: pytest's option `--blocks`.
blocks_run = "inline"


def with_blocks(options: Iterable[str]) -> list[str]:
    """The options of an engine, with blocks where this session wants them."""
    given = list(options)
    if blocks_run == "inline" or "--blocks" in given:
        return given
    # nnsight's own collect finds blocks in the worker only.
    return [*(one for one in given if one != "--check-collect"), "--blocks", blocks_run]


#: Whether a test of this session has said that it starts an engine.
_expected = False


def expect_engines() -> None:
    """A test is about to start an engine, and is marked as such."""
    global _expected
    _expected = True


def check_expected() -> None:
    """Raise in a test that starts an engine and is not marked as such."""
    if "PYTEST_CURRENT_TEST" in os.environ and not _expected:
        raise RuntimeError("a test that starts an engine asks for the fixture starts_engine, which the mark comes from")


class EngineProcess:
    """A running `tracewire engine MODEL` and its log."""

    def __init__(
        self,
        url: str,
        folder: Path,
        *options: str,
        environment: Mapping[str, str] | None = None,
        model: str = "demo",
    ) -> None:
        check_expected()
        if not url.startswith("unix:") and "--code" not in options:
            # A Redis that the test has started itself is not known to be private to this user.
            options = (*options, "--code", "any")
        self.log = folder / "engine.log"
        #: All processes below the supervisor, when it was ready.
        self.below: list[psutil.Process] = []
        self._errors = self.log.open("wb")
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tracewire.cli",
                "engine",
                model,
                "--url",
                url,
                *runner_options(),
                *with_blocks(options),
            ],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
            text=True,
        )

    def wait_ready(self) -> None:
        """Block until the engine serves.

        Raises:
            RuntimeError: it ended instead.
        """
        assert self.process.stdout is not None
        if self.below:
            return  # it was ready before
        for line in self.process.stdout:
            if line.startswith("ready "):
                self.below = self.descendants()
                return
        raise RuntimeError(f"the engine ended with {self.process.wait()}:\n{self.log.read_text()[-4000:]}")

    def descendants(self) -> list[psutil.Process]:
        """All processes below the supervisor."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self) -> int:
        """SIGTERM unless it has ended, and wait for the end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self._errors.close()


@contextmanager
def started_engine(
    url: str, folder: Path, *options: str, environment: Mapping[str, str] | None = None, model: str = "demo"
) -> Iterator[EngineProcess]:
    """An engine on its way, stopped on the way out whatever happened; nothing of it may be left."""
    engine = EngineProcess(url, folder, *options, environment=environment, model=model)
    try:
        yield engine
    finally:
        below = {*engine.below, *(engine.descendants() if engine.process.poll() is None else ())}
        engine.stop()
    _, alive = psutil.wait_procs(below, timeout=30)
    assert not alive, f"left behind: {alive}"
    failed = failed_tasks(engine.log.read_text(errors="replace"))
    assert not failed, failed


@contextmanager
def running_engine(
    url: str, folder: Path, *options: str, environment: Mapping[str, str] | None = None, model: str = "demo"
) -> Iterator[EngineProcess]:
    """Likewise, but one that serves."""
    with started_engine(url, folder, *options, environment=environment, model=model) as engine:
        engine.wait_ready()
        yield engine


def is_asked_for(fixture: str, session: pytest.Session) -> bool:
    """Whether a test of the session needs a fixture, so that what takes long to start may start ahead."""
    return any(fixture in getattr(item, "fixturenames", ()) for item in session.items)


def is_worker() -> bool:
    """Whether this process runs a part of a session's tests, beside others (`pytest -n`)."""
    return "PYTEST_XDIST_WORKER" in os.environ


async def left_running(client: tracewire.Client) -> tracewire.Trace:
    """A trace under way that nobody holds and that runs for long, lost with its engine."""
    model = await client.models.get("demo", timeout=30)
    trace = client.trace(
        model,
        "import os\n",
        blocks.two_names,
        max_tokens=2000,
        ignore_eos=True,
        detach=True,
        on_engine_loss="fail",
    )
    await trace.start()
    seen = 0
    async for item in trace:
        seen += isinstance(item, tracewire.Output)
        if seen == 3:
            break
    return trace


def looked_at_inside(*options: str) -> dict[str, Any]:
    """What `python -m tests.support.inside` finds."""
    check_expected()
    command = [sys.executable, "-m", "tests.support.inside", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    # The whole of it: the engine's own error comes long before the last of the tracebacks.
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
