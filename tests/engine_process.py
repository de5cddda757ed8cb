"""A real engine for the tests: one `tracewire engine demo` process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

__all__ = ["BLOB_THRESHOLD", "ENVIRONMENT", "EngineProcess", "running_engine"]

#: The engine under test runs as bit-stable as a CPU allows.
ENVIRONMENT = {"VLLM_CPU_ATTN_SPLIT_KV": "0"}

#: Saved arrays of more bytes than this are references, on the shared engine.
BLOB_THRESHOLD = 65536


class EngineProcess:
    """A running `tracewire engine demo` and its log."""

    def __init__(self, url: str, folder: Path, *options: str, environment: Mapping[str, str] | None = None) -> None:
        self.log = folder / "engine.log"
        self._errors = self.log.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tracewire.cli", "engine", "demo", "--url", url, *options],
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
def running_engine(
    url: str, folder: Path, *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[EngineProcess]:
    """An engine that serves, stopped on the way out whatever happened; nothing of it may be left."""
    engine = EngineProcess(url, folder, *options, environment=environment)
    try:
        engine.wait_ready()
        below = engine.descendants()
        yield engine
    finally:
        if engine.process.poll() is None:
            engine.stop()
    _, alive = psutil.wait_procs(below, timeout=30)
    assert not alive, f"left behind: {alive}"
