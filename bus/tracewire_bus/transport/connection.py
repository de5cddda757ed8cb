"""A connection to one Redis server: the login, and the base class of all kinds of connections.

The classes have the methods of redis-py's connection that the bus uses, and raise the same errors. Redis-py still
parses the URL and makes the TLS context and the errors of error replies; hiredis parses the replies.

docs/internals/decisions.md explains why the bus does not use redis-py's own connection.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import anyio
from redis import exceptions as redis

__all__ = ["MORE", "Connection", "checked", "reason"]

#: How much memory a parser keeps between two replies, in bytes.
_PARSER_BYTES: Final = 1024 * 1024
#: The parser's result while a reply has not arrived completely.
MORE: Final = object()


class Connection(ABC):
    """One connection to a server, which the constructor does not open.

    Args:
        settings: an unopened connection of redis-py's, for its address, credentials and options.

    Attributes:
        host: the server's host; empty for a unix socket.
        port: the server's port; 0 for a unix socket.
    """

    def __init__(self, settings: Any) -> None:
        self._settings = settings
        self._path: str = getattr(settings, "path", "")
        self.host: str = getattr(settings, "host", "")
        self.port: int = getattr(settings, "port", 0)

    @property
    @abstractmethod
    def connected(self) -> bool:
        """Whether the connection is open, as far as this process knows."""

    @abstractmethod
    async def _open(self) -> None:
        """Open the socket.

        Raises:
            OSError: no server listens there, or the TLS handshake fails.
        """

    @abstractmethod
    async def send_packed_command(self, packed: bytes | Sequence[bytes | memoryview]) -> None:
        """Send commands in Redis's protocol, in one buffer or in several.

        Raises:
            redis.exceptions.ConnectionError: the connection broke.
        """

    @abstractmethod
    async def read_replies(self, count: int) -> list[Any]:
        """Read the next `count` replies. The reply to a command that the server refused is its `ResponseError`.

        Raises:
            redis.exceptions.ConnectionError: the connection broke, or the server cannot answer yet.
            redis.exceptions.InvalidResponse: the server sent something that is not a reply.
        """

    async def read_response(self) -> Any:
        """Read the next reply.

        Raises:
            redis.exceptions.ResponseError: the server refused the command. The connection stays usable.
            redis.exceptions.ConnectionError: the connection broke.
            redis.exceptions.InvalidResponse: the server sent something that is not a reply.
        """
        (reply,) = await self.read_replies(1)
        if isinstance(reply, redis.ResponseError):
            raise reply
        return reply

    @abstractmethod
    async def disconnect(self, nowait: bool = True) -> None:
        """Close the connection at once, even if the caller is cancelled."""

    async def connect(self) -> None:
        """Connect, log in and select the database, within the timeout for connecting. Does nothing if connected.

        Raises:
            redis.exceptions.AuthenticationError: the server refuses the credentials.
            redis.exceptions.ConnectionError: the server cannot be reached, or the TLS handshake fails.
            redis.exceptions.TimeoutError: the server did not answer in time.
        """
        if self.connected:
            return
        try:
            with anyio.fail_after(self._settings.socket_connect_timeout):
                await self._open()
                await self._introduce()
        except BaseException as error:
            await self.disconnect()
            if isinstance(error, redis.RedisError) or not isinstance(error, Exception):
                raise
            kind = redis.TimeoutError if isinstance(error, TimeoutError) else redis.ConnectionError
            where = self._path or f"{self.host}:{self.port}"
            raise kind(f"Error connecting to {where}: {reason(error)}") from error

    async def _introduce(self) -> None:
        """Log in, send the client's and the library's names, and select the database, in one round trip."""
        settings = self._settings
        login: tuple[str, ...] = (settings.password,) if settings.password else ()
        if settings.username:
            login = (settings.username, settings.password or "")
        # Since redis-py 7.1 `driver_info` has the library's name and version.
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
            except redis.ResponseError:
                # Redis before 7.2 has no CLIENT SETINFO.
                pass

    async def send_command(self, *command: Any) -> None:
        """Send one command.

        Raises:
            redis.exceptions.ConnectionError: the connection broke.
        """
        await self.send_packed_command(_packed(command))

    def _parser(self) -> Any:
        """A new parser of replies. It returns `MORE` while a reply has not arrived completely."""
        from hiredis import Reader
        from redis.asyncio.connection import DefaultParser

        parser = Reader(protocolError=redis.InvalidResponse, replyError=DefaultParser.parse_error, notEnoughData=MORE)
        # By default hiredis allocates its buffer anew for each reply of more than 16 KiB.
        parser.setmaxbuf(_PARSER_BYTES)
        return parser

    def _keep_alive(self, raw: socket.socket) -> None:
        """Have the operating system notice a server that is gone, if the settings ask for that."""
        if self._settings.socket_keepalive:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in self._settings.socket_keepalive_options.items():
                raw.setsockopt(socket.IPPROTO_TCP, option, value)


def _packed(command: Sequence[Any]) -> bytes:
    from hiredis import pack_command

    packed: bytes = pack_command(tuple(command))
    return packed


def checked(reply: Any) -> Any:
    """A reply as `Connection.read_replies` returns it.

    Raises:
        redis.exceptions.RedisError: it is an error other than a command's refusal.
    """
    if isinstance(reply, redis.RedisError) and not isinstance(reply, redis.ResponseError):
        raise reply
    return reply


def reason(error: BaseException) -> str:
    """The text of an error's cause, or of the errors in a group."""
    if error.__cause__ is not None and not isinstance(error, TimeoutError):
        error = error.__cause__
    several = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
    return "; ".join(dict.fromkeys(str(one) or type(one).__name__ for one in several))
