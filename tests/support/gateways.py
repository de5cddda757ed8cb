"""A gateway in this process, on a port of its own, for the tests of `tracewire.gateway`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai

from tests.support.until import until
from tracewire.gateway.server import Binding, Server
from tracewire.gateway.settings import Settings
from tracewire.gateway.state import Gateway

__all__ = ["Served", "serving"]


class Served:
    """A gateway that serves, and clients of it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.url = server.url

    @property
    def gateway(self) -> Gateway:
        """Its state."""
        return self.server.app.state.gateway

    def http(self, key: str = "", **options: Any) -> httpx.AsyncClient:
        """An HTTP client of it."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=60, **options)

    def openai(self, key: str = "none", **options: Any) -> openai.AsyncOpenAI:
        """The stock client of it."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, timeout=60, **{"max_retries": 0, **options})

    def stop(self) -> None:
        """Do as SIGTERM does."""
        self.server.should_exit = True


@asynccontextmanager
async def serving(url: str, prefix: str, port: int = 0, **settings: Any) -> AsyncIterator[Served]:
    """A gateway of the bus at `url`, until the context is left."""
    server = Server(Settings(url=url, prefix=prefix, **{"drain_s": 0.0, **settings}), Binding(port=port))
    # A task and no task group: fixtures are entered and left in different tasks. Not by `serve`, which takes the
    # process's signals.
    running = asyncio.create_task(server._serve(sockets=[server._socket]))
    try:
        await until(lambda: server.started or running.done())
        yield Served(server)
    finally:
        server.should_exit = True
        await running
