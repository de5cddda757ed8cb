"""A way to Redis that can be cut where a test wants it cut."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.lowlevel
from anyio.abc import SocketAttribute, SocketStream


class Proxy:
    """Forwards connections to Redis's socket at `address`. `url` is what to connect to."""

    def __init__(self, address: str, path: Path) -> None:
        self.address = address
        self.path = path
        self.url = f"unix://{path}"
        self._streams: set[SocketStream] = set()
        #: Bytes of the replies that were forwarded.
        self.delivered = 0
        #: Cut a connection instead of forwarding a reply to a request that held this.
        self.swallow: bytes | None = None
        self.swallowed = anyio.Event()
        #: Called as it is cut.
        self.on_swallow: Callable[[], None] | None = None
        #: Turn new connections away.
        self.away = False
        self._going = anyio.Event()
        self._going.set()
        self._frozen: set[SocketStream] = set()
        #: Take more connections than these, and never answer.
        self.served: int | None = None

    async def cut(self) -> None:
        """End every connection, also for what has come and is not forwarded yet."""
        for stream in self._streams:
            # Closed while something comes, anyio's stream would have asyncio log an error.
            with suppress(OSError):
                stream.extra(SocketAttribute.raw_socket).shutdown(socket.SHUT_RDWR)
        await anyio.lowlevel.checkpoint()

    def freeze(self) -> None:
        """Forward nothing more over the connections that are open, and say so to neither end. New ones work."""
        self._frozen |= self._streams

    def stop(self) -> None:
        """Keep new connections waiting."""
        self._going = anyio.Event()

    def go_on(self) -> None:
        """Serve those that wait."""
        self._going.set()

    async def _thawed(self, stream: SocketStream) -> None:
        if stream in self._frozen:
            await anyio.sleep_forever()

    async def _forward(self, client: SocketStream) -> None:
        await self._going.wait()
        if self.away:
            await anyio.aclose_forcefully(client)
            return
        if self.served is not None and len(self._streams) >= 2 * self.served:
            await anyio.sleep_forever()
        server = await anyio.connect_unix(self.address)
        cut = False

        async def requests() -> None:
            nonlocal cut
            async for data in client:
                if self.swallow is not None and self.swallow in data:
                    cut = True
                    self.swallow = None
                await self._thawed(server)
                await server.send(data)

        self._streams |= {client, server}
        try:
            async with client, server, anyio.create_task_group() as group:
                group.start_soon(requests)
                async for data in server:
                    if cut:
                        self.swallowed.set()
                        if self.on_swallow is not None:
                            self.on_swallow()
                        break
                    await self._thawed(client)
                    self.delivered += len(data)
                    await client.send(data)
                group.cancel_scope.cancel()
        except* (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream):
            pass
        finally:
            self._streams -= {client, server}
            self._frozen -= {client, server}


@asynccontextmanager
async def proxy(url: str, folder: Path) -> AsyncIterator[Proxy]:
    """A proxy in front of the Redis at `url`."""
    through = Proxy(url.removeprefix("unix://"), folder / "p.sock")
    listener = await anyio.create_unix_listener(through.path)
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, through._forward)
        try:
            yield through
        finally:
            group.cancel_scope.cancel()
