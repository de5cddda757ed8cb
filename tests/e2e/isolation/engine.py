"""The engine that the kinds are tried on. It is started anew where a kind has cost it or changed it."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread
import psutil

from tests.support.command_lines import with_words
from tests.support.engine_process import EngineProcess
from tests.support.until import until
from tracewire_bus.bus import Bus

from .kinds import CANARY

__all__ = ["BLOCK_TIMEOUT_S", "TriedEngine", "offers_modes"]

#: How long a block may take in a step, in seconds.
BLOCK_TIMEOUT_S = 2.0

#: How long an engine may take to end what an offender has started, in seconds.
_SETTLE_S = 10.0

#: How long an engine may take to start, in minutes.
_START_MINUTES = 5

#: A word of the command line of the adapter's process for long sources.
_CHECKS = "anyio.to_process"


def offers_modes() -> bool:
    """Whether this `tracewire engine` has the option `--blocks`."""
    command = [sys.executable, "-m", "tracewire.cli", "engine", "--help"]
    return "--blocks " in subprocess.run(command, capture_output=True, text=True, check=False).stdout


class TriedEngine:
    """A `tracewire engine demo` on a bus, and what can be seen of its processes.

    Args:
        url: of the engine's Redis.
        folder: for the engine's log.
        options: further options of `tracewire engine`.
    """

    def __init__(self, url: str, folder: Path, *options: str) -> None:
        self._url, self._folder, self._options = url, folder, options
        self._engine: EngineProcess | None = None
        self._starts = 0

    async def start(self, bus: Bus) -> None:
        """Start the engine, and wait until it serves."""
        folder = self._folder / f"start-{self._starts}"
        folder.mkdir(parents=True)
        self._starts += 1
        options = ("--block-timeout", str(BLOCK_TIMEOUT_S), "--drain", "1", *self._options)
        engine = self._engine = EngineProcess(
            self._url, folder, *options, environment={"TRACEWIRE_CANARY": CANARY, "VLLM_LOGGING_LEVEL": "WARNING"}
        )
        await anyio.to_thread.run_sync(engine.wait_ready)
        # Blocks print, and an engine whose output is not read would wait.
        threading.Thread(target=self._drain, args=(engine,), daemon=True).start()
        await self.wait_serving(bus)

    @staticmethod
    def _drain(engine: EngineProcess) -> None:
        stream = engine.process.stdout
        assert stream is not None
        with suppress(ValueError, OSError):
            while stream.buffer.read1(1 << 20):
                pass

    async def wait_serving(self, bus: Bus) -> None:
        """Wait until the registry has an engine that serves.

        Raises:
            TimeoutError: none serves in time.
        """

        async def serves() -> bool:
            return any(info.state == "serving" for info in await bus.registry.list())

        for _ in range(_START_MINUTES - 1):
            # On a loaded machine an engine starts slowly.
            with suppress(TimeoutError):
                return await until(serves)
        await until(serves)

    def stop(self) -> str:
        """Stop the engine and what it has started. Returns its log."""
        engine, self._engine = self._engine, None
        if engine is None:
            return ""
        below = engine.descendants() if engine.process.poll() is None else []
        with suppress(subprocess.TimeoutExpired):
            engine.stop()
        for process in below:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(below, timeout=_SETTLE_S)
        return engine.log.read_text(errors="replace")

    def below(self) -> list[psutil.Process]:
        """The processes below the supervisor that live."""
        engine = self._engine
        found = []
        for process in engine.descendants() if engine is not None and engine.process.poll() is None else ():
            with suppress(psutil.Error):
                # The adapter keeps a process in which it checks long sources.
                if process.status() != psutil.STATUS_ZOMBIE and _CHECKS not in process.cmdline():
                    found.append(process)
        return found

    def model_processes(self) -> set[psutil.Process]:
        """vLLM's processes: its engine core and its workers. A process that was started anew is another one."""
        return {*with_words(self.below(), "EngineCore"), *with_words(self.below(), "Worker")}

    def kill_model(self) -> None:
        """Kill vLLM's processes, as an operator would kill an engine that hangs."""
        for process in self.model_processes():
            with suppress(psutil.Error):
                process.kill()

    async def kill_late(self) -> None:
        """Kill vLLM's processes, when a batch has taken too long."""
        self.kill_model()

    async def settled(self, processes: int) -> bool:
        """Whether the engine has at most this many processes, at once or a little later."""
        with anyio.move_on_after(_SETTLE_S) as late:
            await until(lambda: len(self.below()) <= processes)
        return not late.cancelled_caught
