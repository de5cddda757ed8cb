"""A real engine for the tests: one `tracewire engine demo` process on an embedded Redis, shared by the session."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import tracewire
from tracewire import Client, Model
from tracewire_bus.embedded import EmbeddedServer

#: The engine under test runs as bit-stable as a CPU allows.
ENVIRONMENT = {"VLLM_CPU_ATTN_SPLIT_KV": "0"}

#: Saved arrays of more bytes than this are references, on the shared engine.
BLOB_THRESHOLD = 65536

#: Test files of this folder that start no engine.
ENGINELESS = {"test_declared_plan.py", "test_large.py", "test_marks.py", "test_saves.py", "test_taps.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts an engine, so that `make test-engineless` can leave it out."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and item.path.name not in ENGINELESS:
            item.add_marker(pytest.mark.engine)


class EngineProcess:
    """A running `tracewire engine demo` and its log."""

    def __init__(self, url: str, folder: Path, *options: str) -> None:
        self.log = folder / "engine.log"
        self._errors = self.log.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tracewire.cli", "engine", "demo", "--url", url, *options],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **ENVIRONMENT},
            text=True,
        )

    def wait_ready(self) -> None:
        """Block until the engine serves.

        Raises:
            RuntimeError: it ended instead.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ready "):
                return
        raise RuntimeError(f"the engine ended with {self.process.wait()}:\n{self.log.read_text()[-4000:]}")

    def descendants(self) -> list[psutil.Process]:
        """All processes below the adapter."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self) -> int:
        """SIGTERM, and wait for the end."""
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
def running_engine(url: str, folder: Path, *options: str) -> Iterator[EngineProcess]:
    """An engine that serves, stopped on the way out whatever happened; nothing of it may be left."""
    engine = EngineProcess(url, folder, *options)
    try:
        engine.wait_ready()
        below = engine.descendants()
        yield engine
    finally:
        if engine.process.poll() is None:
            engine.stop()
    _, alive = psutil.wait_procs(below, timeout=30)
    assert not alive, f"left behind: {alive}"


@pytest.fixture(scope="session")
async def engine_bus() -> AsyncIterator[str]:
    """URL of the Redis that the shared engine serves."""
    async with EmbeddedServer.start() as server:
        yield server.url


@pytest.fixture(scope="session")
def engine(engine_bus: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """The shared engine. Every trace's saves are also collected by nnsight's own collect and compared by digest."""
    options = ("--check-collect", "--block-timeout", "3", "--blob-threshold", str(BLOB_THRESHOLD))
    with running_engine(engine_bus, tmp_path_factory.mktemp("engine"), *options) as engine:
        yield engine


@pytest.fixture
async def client(engine: EngineProcess, engine_bus: str) -> AsyncIterator[Client]:
    """A client of the shared engine's bus."""
    async with tracewire.connect(engine_bus) as client:
        yield client


@pytest.fixture
async def model(client: Client) -> Model:
    """The demo model as the client sees it."""
    return await client.model("demo", wait_for_engine=30)
