"""Bulk stores on other hosts: an engine serves its stores over TCP, and consumers ask for ranges.

A connection begins with a line, the token of the store. Then each request is a line of JSON, `[store, segment,
offset, nbytes]`, and each reply a line, `ok <nbytes>` and the bytes, or `no <why>`. Connections are kept for later
requests.

A client that can read the stream of a trace on Redis can read the tokens. The bytes travel unencrypted, so a network
with untrusted hosts needs a tunnel, as for Redis without TLS.
"""

from __future__ import annotations

import hmac
import json
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Final

import anyio
from anyio.abc import SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

from tracewire_bus.wire.bulk_ranges import BulkRange

from .stores import StorePlace

__all__ = ["RemoteStores", "StoreRefused", "serve_bulk"]

logger = logging.getLogger("tracewire")

#: How long a connection attempt, and the wait for the next bytes of a reply, may take, in seconds.
_PATIENCE_S: Final = 10.0
#: For how long a consumer does not ask an engine again that has not answered, in seconds.
_SILENT_S: Final = 30.0
#: How long the server keeps a connection on which nothing is asked, in seconds.
_IDLE_S: Final = 60.0
_BROKEN: Final = (OSError, anyio.BrokenResourceError, anyio.EndOfStream, anyio.IncompleteRead)
_LINE: Final = 4096
_CHUNK: Final = 1 << 20
#: How many idle connections to one engine are kept.
_IDLE: Final = 4


class StoreRefused(Exception):
    """The engine that serves a store does not answer, or has no such bytes."""


class _Connection:
    def __init__(self, stream: SocketStream) -> None:
        self.stream = stream
        self.received = BufferedByteReceiveStream(stream)

    async def aclose(self) -> None:
        await anyio.aclose_forcefully(self.stream)


class RemoteStores:
    """Connections to the engines that serve stores."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, str], list[_Connection]] = {}
        #: Until when an engine that has not answered is not asked again, by address.
        self._silent_until: dict[str, float] = {}
        self._closed = False

    async def read(self, place: StorePlace, where: BulkRange) -> bytes:
        """The bytes of a range, from the engine that serves the store.

        Raises:
            StoreRefused: the engine does not answer, or has no such bytes.
        """
        if anyio.current_time() < self._silent_until.get(place.address, -math.inf):
            raise StoreRefused("it has not answered of late")
        try:
            return await self._read(place, where)
        except TimeoutError:
            self._silent_until[place.address] = anyio.current_time() + _SILENT_S
            raise StoreRefused("it does not answer in time") from None
        except _BROKEN as error:
            raise StoreRefused(str(error) or "it closed the connection") from error

    async def _read(self, place: StorePlace, where: BulkRange) -> bytes:
        idle = self._idle.get((place.address, place.token), [])
        while idle:
            try:
                return await self._ask(idle.pop(), place, where)
            except TimeoutError:
                raise
            except _BROKEN:
                # The engine has closed the idle connection meanwhile.
                continue
        return await self._ask(await _connect(place), place, where)

    async def _ask(self, connection: _Connection, place: StorePlace, where: BulkRange) -> bytes:
        kept = False
        try:
            request = [where.store, where.segment, where.offset, where.nbytes]
            await connection.stream.send(json.dumps(request).encode() + b"\n")
            with anyio.fail_after(_PATIENCE_S):
                line = (await connection.received.receive_until(b"\n", _LINE)).decode("utf-8", "replace")
            what, _, rest = line.partition(" ")
            if what != "ok" or not rest.isdecimal() or int(rest) != where.nbytes:
                kept = what == "no"
                raise StoreRefused(rest if kept else "its answer makes no sense")
            data = await _receive(connection.received, where.nbytes)
            kept = True
            return data
        except anyio.DelimiterNotFound:
            raise StoreRefused("its answer makes no sense") from None
        finally:
            idle = self._idle.setdefault((place.address, place.token), [])
            if kept and len(idle) < _IDLE and not self._closed:
                idle.append(connection)
            else:
                await connection.aclose()

    async def aclose(self) -> None:
        """Close all idle connections, and the others at the end of their requests."""
        self._closed = True
        for idle in self._idle.values():
            while idle:
                await idle.pop().aclose()


async def _connect(place: StorePlace) -> _Connection:
    host, _, port = place.address.rpartition(":")
    with anyio.fail_after(_PATIENCE_S):
        connection = _Connection(await anyio.connect_tcp(host.strip("[]"), int(port)))
        try:
            await connection.stream.send(place.token.encode() + b"\n")
        except BaseException:
            await connection.aclose()
            raise
    return connection


async def _receive(received: BufferedByteReceiveStream, nbytes: int) -> bytes:
    parts, left = [], nbytes
    while left:
        with anyio.fail_after(_PATIENCE_S):
            part = await received.receive(min(left, _CHUNK))
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


async def serve_bulk(
    stream: SocketStream, token: str, read: Callable[[str, str, int, int], Awaitable[bytes | None]]
) -> None:
    """Serve one consumer until it leaves, or asks for nothing for a minute.

    Args:
        stream: the consumer's connection.
        token: what the consumer must show.
        read: reads `nbytes` bytes at `offset` of a segment of a store; `None` if there are none.
    """
    received = BufferedByteReceiveStream(stream)
    try:
        with anyio.fail_after(_PATIENCE_S):
            shown = await received.receive_until(b"\n", _LINE)
        if not hmac.compare_digest(shown, token.encode()):
            await stream.send(b"no this token is not the store's\n")
            return
        while True:
            with anyio.fail_after(_IDLE_S):
                line = await received.receive_until(b"\n", _LINE)
            await _answer(stream, line, read)
    except (*_BROKEN, anyio.DelimiterNotFound) as error:
        logger.debug("a consumer of bulk has left: %r", error)
    finally:
        await anyio.aclose_forcefully(stream)


async def _answer(
    stream: SocketStream, line: bytes, read: Callable[[str, str, int, int], Awaitable[bytes | None]]
) -> None:
    try:
        store, segment, offset, nbytes = json.loads(line)
        if not (isinstance(store, str) and isinstance(segment, str) and type(offset) is type(nbytes) is int):
            raise ValueError
        if offset < 0 or nbytes < 0:
            raise ValueError
    except (ValueError, TypeError, RecursionError):
        await stream.send(b"no a request is [store, segment, offset, nbytes]\n")
        return
    try:
        data = await read(store, segment, offset, nbytes)
    except OSError as error:
        await stream.send(f"no {error.strerror or error}\n".encode())
        return
    if data is None:
        await stream.send(b"no there are no such bytes: they are gone with their trace\n")
        return
    # A slow consumer keeps these bytes in memory, and delays no other consumer.
    with anyio.fail_after(_IDLE_S):
        await stream.send(b"ok %d\n" % len(data) + data[:_CHUNK])
    for start in range(_CHUNK, len(data), _CHUNK):
        with anyio.fail_after(_IDLE_S):
            await stream.send(data[start : start + _CHUNK])
