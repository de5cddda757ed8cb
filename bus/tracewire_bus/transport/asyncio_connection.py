"""A connection to one Redis server for asyncio, which feeds received bytes to the parser without a stream in between.

asyncio's `StreamReader`, which redis-py uses, copies every reply twice more, and wakes the caller for each part of a
large one.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from redis import exceptions as redis

from .connection import MORE, Connection, checked, reason

__all__ = ["AsyncioConnection"]

#: Most bytes of one read.
_READ_BYTES: Final = 256 * 1024


class _ReadBuffer(threading.local):
    """The buffer into which the connections of one thread read. Each read is parsed before the next one begins."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(_READ_BYTES))


_buffer = _ReadBuffer()


class _Socket(asyncio.BufferedProtocol):
    """An open socket and the replies that it has received."""

    transport: asyncio.Transport

    def __init__(self, loop: asyncio.AbstractEventLoop, parser: Any) -> None:
        self._loop = loop
        self._parser = parser
        self._view = _buffer.view
        self.replies: deque[Any] = deque()
        #: Why there will be no further replies; None while the socket is open.
        self.lost: Exception | None = None
        #: Set when a reply is there; and when the transport takes more bytes.
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        parser = self._parser
        try:
            parser.feed(self._view, 0, nbytes)
            while (reply := parser.gets()) is not MORE:
                self.replies.append(reply)
        except Exception as error:
            self._lose(error)
            self.transport.abort()
        if self.replies:
            _wake(self._reader)

    def connection_lost(self, error: Exception | None) -> None:
        if error is None:
            self._lose(redis.ConnectionError("Connection closed by server."))
        else:
            self._lose(redis.ConnectionError(f"Error while reading from socket: {reason(error)}"))

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        _wake(self._writer)

    def _lose(self, error: Exception) -> None:
        if self.lost is None:
            self.lost = error
        _wake(self._reader)
        _wake(self._writer)

    async def received(self) -> None:
        """Wait until there is a reply, or until the connection is lost."""
        while not self.replies and self.lost is None:
            self._reader = self._loop.create_future()
            await self._reader

    async def sent(self) -> None:
        """Wait until the transport takes more bytes, or until the connection is lost."""
        while self._paused and self.lost is None:
            self._writer = self._loop.create_future()
            await self._writer


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


class AsyncioConnection(Connection):
    """A connection that runs on asyncio."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._socket: _Socket | None = None

    @property
    def connected(self) -> bool:
        return self._socket is not None

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()

        def made() -> _Socket:
            return _Socket(loop, self._parser())

        if self._path:
            _, self._socket = await loop.create_unix_connection(made, self._path)
            return
        tls = getattr(self._settings, "ssl_context", None)
        transport, self._socket = await loop.create_connection(
            made, self.host, self.port, ssl=None if tls is None else tls.get()
        )
        self._keep_alive(transport.get_extra_info("socket"))

    async def send_packed_command(self, packed: bytes | Sequence[bytes | memoryview]) -> None:
        socket = self._socket
        if socket is None:
            raise redis.ConnectionError("Connection closed")
        if socket.lost is None:
            if isinstance(packed, bytes):
                socket.transport.write(packed)
            else:
                socket.transport.writelines(packed)
            await socket.sent()
        if socket.lost is not None:
            raise redis.ConnectionError(f"Error while writing to socket: {socket.lost}") from socket.lost

    async def read_replies(self, count: int) -> list[Any]:
        socket = self._socket
        if socket is None:
            raise redis.ConnectionError("Connection closed")
        replies: list[Any] = []
        while len(replies) < count:
            if not socket.replies:
                await socket.received()
                if not socket.replies:
                    assert socket.lost is not None
                    raise socket.lost
            replies.append(checked(socket.replies.popleft()))
        return replies

    async def disconnect(self, nowait: bool = True) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.transport.abort()
