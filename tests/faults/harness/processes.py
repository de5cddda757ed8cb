"""The processes that the fault harness breaks: Redis servers, engines and consumers.

Engines and consumers come from a *nursery*, a process that has imported what they need and forks one whenever it is
asked to: a trial may cost several, and a start of Python costs a second of each. What it forks runs `main` of
`tests.support.scripted_engine` or `tests.faults.harness.consumer` with the arguments that a command line would have.
All die with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread

from tests.support import ROOT
from tests.support.redis import process
from tests.support.redis.process import free_port

__all__ = ["Child", "Nursery", "RedisServer", "free_port", "nursery"]


class RedisServer(process.RedisServer):
    """A real redis-server with a folder of its own, on a unix socket and a TCP port."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.port = free_port()
        socket = folder / "redis.sock"
        own = {"port": self.port, "unixsocket": socket}
        super().__init__(folder, f"unix://{socket}", (own | settings).items())

    def nodes(self) -> list[RedisServer]:
        """Where keys lie."""
        return [self]


class Child:
    """A process out of the nursery."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log
        self.ended = anyio.Event()
        self.status: int | None = None

    def send(self, number: int) -> None:
        """Send it a signal, if it is still there."""
        if not self.ended.is_set():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self.send(signal.SIGKILL)
        await self.ended.wait()


class Nursery:
    """Starts engines and consumers."""

    def __init__(self, process: anyio.abc.Process, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._lock = anyio.Lock()
        self._born, self._births = anyio.create_memory_object_stream[Child](10)
        self._children: dict[int, Child] = {}
        self._count = 0

    async def start(self, kind: str, *arguments: str) -> Child:
        """Start an `engine` or a `consumer`."""
        assert self._process.stdin is not None
        async with self._lock:
            self._count += 1
            log = self._folder / f"{kind}-{self._count}.log"
            line = json.dumps({"kind": kind, "arguments": arguments, "log": str(log)})
            await self._process.stdin.send(line.encode() + b"\n")
            return await self._births.receive()

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        rest = b""
        async for data in self._process.stdout:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                said = json.loads(line)
                if "born" in said:
                    child = self._children[said["born"]] = Child(said["born"], Path(said["log"]))
                    await self._born.send(child)
                else:
                    child = self._children.pop(said["ended"])
                    child.status = said["status"]
                    child.ended.set()


@asynccontextmanager
async def nursery(folder: Path) -> AsyncIterator[Nursery]:
    """A nursery; its processes write their logs into `folder`."""
    command = [sys.executable, "-m", "tests.faults.harness.processes"]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = await anyio.open_process(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None, cwd=ROOT, env=environment
    )
    try:
        async with anyio.create_task_group() as group:
            started = Nursery(process, folder)
            group.start_soon(started._listen)
            try:
                yield started
            finally:
                group.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            with suppress(ProcessLookupError):
                process.kill()
            await process.aclose()


# --- the nursery's own process ----------------------------------------------------------------------------------------


def _child(order: dict[str, object]) -> None:
    """What a forked process does until it ends."""
    from tests.faults.harness import consumer
    from tests.support import scripted_engine

    kind, arguments, log = order["kind"], order["arguments"], order["log"]
    assert isinstance(arguments, list)
    assert isinstance(log, str)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, taken in ((0, nothing), (1, file), (2, file)):
        os.dup2(taken, descriptor)
    os.closerange(3, 256)
    status = 70
    try:
        status = (scripted_engine.main if kind == "engine" else consumer.main)(_texts(arguments))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _texts(arguments: Sequence[object]) -> list[str]:
    return [str(argument) for argument in arguments]


def main() -> None:
    """Fork what standard input asks for, until it ends."""
    from tests.faults.harness import consumer  # noqa: F401
    from tests.support import scripted_engine  # noqa: F401

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    os.set_blocking(reading, False)
    signal.set_wakeup_fd(writing)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(reading, selectors.EVENT_READ)
    rest = b""
    while True:
        for key, _ in selector.select():
            data = os.read(key.fd, 65536)
            if key.fd == reading:
                continue
            if not data:
                os._exit(0)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    _child(order)
                print(json.dumps({"born": pid, "log": order["log"]}), flush=True)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            print(json.dumps({"ended": pid, "status": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    main()
