"""A connection to one Redis server over anyio's sockets, for trio."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import anyio
from anyio.abc import ByteStream, SocketAttribute
from redis import exceptions as redis

from .connection import MORE, Connection, checked, reason

__all__ = ["AnyioConnection"]

#: Bytes of one read.
_READ_BYTES: Final = 65536
#: The errors of a broken connection. With TLS, sending can raise `EndOfStream`, too.
_BROKEN: Final = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream)


class AnyioConnection(Connection):
    """A connection that runs on trio and on asyncio."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._stream: ByteStream | None = None
        self._replies: Any = None

    @property
    def connected(self) -> bool:
        return self._stream is not None

    async def _open(self) -> None:
        if self._path:
            self._stream = await anyio.connect_unix(self._path)
        else:
            tls = getattr(self._settings, "ssl_context", None)
            if tls is None:
                stream: ByteStream = await anyio.connect_tcp(self.host, self.port)
            else:
                stream = await anyio.connect_tcp(
                    self.host, self.port, ssl_context=tls.get(), tls_hostname=self.host, tls_standard_compatible=False
                )
            self._stream = stream
            self._keep_alive(stream.extra(SocketAttribute.raw_socket))
        self._replies = self._parser()

    async def send_packed_command(self, packed: bytes | Sequence[bytes | memoryview]) -> None:
        if self._stream is None:
            raise redis.ConnectionError("Connection closed")
        try:
            await self._stream.send(packed if isinstance(packed, bytes) else b"".join(packed))
        except _BROKEN as error:
            raise redis.ConnectionError(f"Error while writing to socket: {reason(error)}") from error

    async def read_replies(self, count: int) -> list[Any]:
        return [checked(await self._read()) for _ in range(count)]

    async def _read(self) -> Any:
        replies = self._replies
        reply = replies.gets()
        while reply is MORE:
            if self._stream is None:
                raise redis.ConnectionError("Connection closed")
            try:
                replies.feed(await self._stream.receive(_READ_BYTES))
            except anyio.EndOfStream as error:
                raise redis.ConnectionError("Connection closed by server.") from error
            except _BROKEN as error:
                raise redis.ConnectionError(f"Error while reading from socket: {reason(error)}") from error
            reply = replies.gets()
        return reply

    async def disconnect(self, nowait: bool = True) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await anyio.aclose_forcefully(stream)
