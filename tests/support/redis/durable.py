"""Redis servers of a test's own: to be killed, brought back with less, and followed by replicas."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from tracewire_bus.transport.embedded import _answers, _binary, _die_with_parent

__all__ = ["Server", "server"]


class Server:
    """A redis-server with a log in a folder of its own, on a socket that stays where it is."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self.log = folder / "appendonly.aof"
        self._settings = {
            "port": 0,
            "unixsocket": self.socket,
            "dir": folder,
            "save": "",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "aof-load-truncated": "yes",
            "auto-aof-rewrite-percentage": 0,
            "repl-diskless-sync": "yes",
            "repl-diskless-sync-delay": 0,
        } | {name.replace("_", "-"): value for name, value in settings.items()}
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start it; it answers on return."""
        arguments = [part for name, value in self._settings.items() for part in (f"--{name}", *str(value).split())]
        with (self.folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220
                [_binary(), *arguments], stdout=log, stderr=log, preexec_fn=_die_with_parent(), start_new_session=True
            )
        with anyio.fail_after(20):
            while not await _answers(self.socket):
                assert self._process.poll() is None
                await anyio.sleep(0.005)

    def kill(self) -> None:
        """Kill it, as a power cut would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    @property
    def written(self) -> int:
        """How much of its log is written. What was acknowledged is."""
        return self.log.stat().st_size

    def forget(self, since: int) -> None:
        """Lose what it wrote to its log since then: it had not come to the disk when it was killed."""
        assert self._process is None
        with self.log.open("r+b") as log:
            log.truncate(since)

    async def lose(self, since: int) -> None:
        """Die, and come back with what was in the log then."""
        self.kill()
        self.forget(since)
        await self.start()


@asynccontextmanager
async def server(folder: Path, **settings: Any) -> AsyncIterator[Server]:
    """A running server."""
    folder.mkdir(exist_ok=True)  # noqa: ASYNC240
    one = Server(folder, **settings)
    await one.start()
    try:
        yield one
    finally:
        one.kill()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
