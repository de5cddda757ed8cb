"""A connection to one Redis server over anyio's sockets, for trio, where redis-py's does not run.

It has the methods of redis-py's connection that the bus uses, and raises the same errors. Redis-py still reads the URL,
makes the TLS context and the errors that stand for replies; hiredis parses the replies.

docs/internals/decisions.md says why redis-py's connection stays on asyncio.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, Final

import anyio
from anyio.abc import ByteStream, SocketAttribute

__all__ = ["AnyioConnection"]

#: How many bytes are read at once.
_READ_BYTES: Final = 65536
#: What a broken connection raises. By TLS sending finds the end of the stream, too.
_BROKEN: Final = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream)
#: Stands for a reply that has not arrived in whole.
_MORE: Final = object()


class AnyioConnection:
    """One connection, not yet connected. `settings` is a connection of redis-py's to the same server, never connected:
    what it was made of are this one's address, credentials and options.

    Attributes:
        host: name of the server; empty for a unix socket.
        port: its port; 0 for a unix socket.
    """

    def __init__(self, settings: Any) -> None:
        self._settings = settings
        self._path: str = getattr(settings, "path", "")
        self.host: str = getattr(settings, "host", "")
        self.port: int = getattr(settings, "port", 0)
        self._stream: ByteStream | None = None
        self._replies: Any = None

    async def connect(self) -> None:
        """Connect, log in and select the database, within the timeout for connecting. Does nothing when connected.

        Raises:
            redis.exceptions.AuthenticationError: the server does not take the credentials.
            redis.exceptions.ConnectionError: there is no server, or no common TLS.
            redis.exceptions.TimeoutError: it did not answer in time.
        """
        from hiredis import Reader
        from redis import exceptions as redis
        from redis.asyncio.connection import DefaultParser

        if self._stream is not None:
            return
        try:
            with anyio.fail_after(self._settings.socket_connect_timeout):
                self._stream = await self._open()
                self._replies = Reader(
                    protocolError=redis.InvalidResponse, replyError=DefaultParser.parse_error, notEnoughData=_MORE
                )
                await self._introduce()
        except BaseException as error:
            await self.disconnect()
            if isinstance(error, redis.RedisError) or not isinstance(error, Exception):
                raise
            kind = redis.TimeoutError if isinstance(error, TimeoutError) else redis.ConnectionError
            where = self._path or f"{self.host}:{self.port}"
            raise kind(f"Error connecting to {where}: {_why(error)}") from error

    async def _open(self) -> ByteStream:
        settings = self._settings
        if self._path:
            return await anyio.connect_unix(self._path)
        tls = getattr(settings, "ssl_context", None)
        if tls is None:
            stream: ByteStream = await anyio.connect_tcp(self.host, self.port)
        else:
            stream = await anyio.connect_tcp(
                self.host, self.port, ssl_context=tls.get(), tls_hostname=self.host, tls_standard_compatible=False
            )
        if settings.socket_keepalive:
            raw = stream.extra(SocketAttribute.raw_socket)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in settings.socket_keepalive_options.items():
                raw.setsockopt(socket.IPPROTO_TCP, option, value)
        return stream

    async def _introduce(self) -> None:
        """Log in, say who we are and select the database, in one round trip."""
        from redis.exceptions import ResponseError

        settings = self._settings
        login: tuple[str, ...] = (settings.password,) if settings.password else ()
        if settings.username:
            login = (settings.username, settings.password or "")
        # Since redis-py 7.1 an object holds the library's name and version.
        driver = getattr(settings, "driver_info", None)
        name = driver.formatted_name if driver else getattr(settings, "lib_name", None)
        version = driver.lib_version if driver else getattr(settings, "lib_version", None)
        needed = [("AUTH", *login)] if login else []
        needed += [("CLIENT", "SETNAME", settings.client_name)] if settings.client_name else []
        needed += [("SELECT", str(settings.db))] if settings.db else []
        wanted = [("CLIENT", "SETINFO", "LIB-NAME", name)] if name else []
        wanted += [("CLIENT", "SETINFO", "LIB-VER", version)] if version else []
        if not needed and not wanted:
            return
        await self.send_packed_command(b"".join(_packed(command) for command in [*needed, *wanted]))
        for _ in needed:
            await self.read_response()
        for _ in wanted:
            try:
                await self.read_response()
            except ResponseError:
                # A Redis before 7.2 does not know it.
                pass

    async def send_command(self, *command: Any) -> None:
        """Send one command.

        Raises:
            redis.exceptions.ConnectionError: the connection broke.
        """
        await self.send_packed_command(_packed(command))

    async def send_packed_command(self, packed: bytes | Sequence[bytes | memoryview]) -> None:
        """Send commands that are packed, in one buffer or in several.

        Raises:
            redis.exceptions.ConnectionError: the connection broke.
        """
        from redis.exceptions import ConnectionError

        if self._stream is None:
            raise ConnectionError("Connection closed")
        try:
            await self._stream.send(packed if isinstance(packed, bytes) else b"".join(packed))
        except _BROKEN as error:
            raise ConnectionError(f"Error while writing to socket: {_why(error)}") from error

    async def read_response(self) -> Any:
        """The next reply.

        Raises:
            redis.exceptions.ResponseError: the server refused the command. The connection can be used further.
            redis.exceptions.ConnectionError: the connection broke.
            redis.exceptions.InvalidResponse: what came is no reply.
        """
        from redis.exceptions import ConnectionError, RedisError

        replies = self._replies
        reply = replies.gets()
        while reply is _MORE:
            if self._stream is None:
                raise ConnectionError("Connection closed")
            try:
                replies.feed(await self._stream.receive(_READ_BYTES))
            except anyio.EndOfStream as error:
                raise ConnectionError("Connection closed by server.") from error
            except _BROKEN as error:
                raise ConnectionError(f"Error while reading from socket: {_why(error)}") from error
            reply = replies.gets()
        if isinstance(reply, RedisError):
            raise reply
        return reply

    async def disconnect(self, nowait: bool = True) -> None:
        """Close it at once, also when cancelled."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await anyio.aclose_forcefully(stream)


def _packed(command: Sequence[Any]) -> bytes:
    from hiredis import pack_command

    packed: bytes = pack_command(tuple(command))
    return packed


def _why(error: BaseException) -> str:
    """What an error says; one that stands for others says what they say."""
    if error.__cause__ is not None and not isinstance(error, TimeoutError):
        error = error.__cause__
    several = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
    return "; ".join(dict.fromkeys(str(one) or type(one).__name__ for one in several))
