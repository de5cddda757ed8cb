"""The client of a provider: one for all generations of an event loop, connected when it is first needed."""

from __future__ import annotations

import weakref
from typing import Any

from tracewire.client import Client
from tracewire.errors import WrongEventLoop
from tracewire_bus.transport.loops import Loop, current_loop
from tracewire_bus.transport.urls import redacted

__all__ = ["Connection", "connected_to"]

#: The connections of this process that may be open.
_CONNECTIONS: weakref.WeakSet[Connection] = weakref.WeakSet()


class Connection:
    """Makes a client of the bus at `url`, and another one in the place of a client whose event loop has ended.

    Inspect keeps a provider for as long as the process lives, and runs each evaluation in an event loop of its own.

    Raises:
        ConnectError: no URL is given, or the URL names no Redis.
    """

    def __init__(self, url: str | None, options: dict[str, Any]) -> None:
        self._url = url
        self._options = options
        self._loop: Loop | None = None
        # Refuses wrong arguments before the evaluation begins.
        self._client: Client | None = Client(url, **options)
        #: The URL of the Redis without its secrets, and what stands before its keys.
        self.url = redacted(self._client.url)
        self.prefix: str = options.get("prefix", "tw")
        #: Whether Redis has answered at the URL.
        self.reached = False
        _CONNECTIONS.add(self)

    async def client(self) -> Client:
        """The client, connected.

        Raises:
            ConnectError: Redis does not answer, or refuses.
        """
        loop = current_loop()
        if self._client is not None and self._loop is not None and self._loop is not loop:
            await self.aclose()
        if self._client is None:
            self._client = Client(self._url, **self._options)
        self._loop = loop
        client = await self._client.connect()
        # Of a private Redis, known only now.
        self.url, self.reached = redacted(client.url), True
        return client

    async def aclose(self) -> None:
        """Close the client. The next generation makes another one."""
        client, self._client, self._loop = self._client, None, None
        if client is not None:
            try:
                await client.aclose()
            except WrongEventLoop:
                # The loop of another thread, which still runs, ends the client with itself.
                pass


async def connected_to(url: str, prefix: str) -> Client | None:
    """The client of a provider in this process that uses this bus; None if there is none."""
    for connection in list(_CONNECTIONS):
        if (connection.url, connection.prefix) == (url, prefix):
            return await connection.client()
    return None
