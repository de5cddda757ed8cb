"""Redis servers of a test's own: to be killed, brought back with less, and followed by replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.redis.process import RedisServer

__all__ = ["Server", "server"]


class Server(RedisServer):
    """A redis-server with a log in its folder, on a socket that stays where it is."""

    def __init__(self, folder: Path, socket: str = "redis.sock", **settings: Any) -> None:
        self.socket = folder / socket
        self.log = folder / "appendonly.aof"
        own = {
            "port": 0,
            "unixsocket": self.socket,
            "appendonly": "yes",
            # With everysec, Redis acknowledges before it writes while an fsync is under way.
            "appendfsync": "always",
            "aof_load_truncated": "yes",
            "auto_aof_rewrite_percentage": 0,
            "repl_diskless_sync": "yes",
            "repl_diskless_sync_delay": 0,
        }
        super().__init__(folder, f"unix://{self.socket}", (own | settings).items())

    @property
    def written(self) -> int:
        """How much of its log is written. What was acknowledged is."""
        return self.log.stat().st_size

    def forget(self, since: int) -> None:
        """Lose what it wrote to its log since then: it had not come to the disk when it was killed."""
        assert not self.runs
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
        await one.aclose()
