"""Answers that are streams of server-sent events, each sent when its reader has room for it."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from time import monotonic
from typing import Any, Protocol, TypeVar

import anyio
import anyio.lowlevel
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["CLOSING", "SILENCE", "ClientLeft", "EventSource", "Streams", "encoded", "unless_left"]

logger = logging.getLogger("tracewire.gateway")

T = TypeVar("T")

#: How many chunks leave with one write before other tasks have a turn, where events come faster than they are sent.
_CHUNKS_PER_WRITE = 16
#: A chunk of so many bytes leaves by itself.
_LARGE = 16 * 1024


class _Mark:
    """Something that a stream reads in place of an event."""


#: Nothing has come for `keep_alive_s` seconds.
SILENCE = _Mark()
#: The gateway stops, and the stream has to end.
CLOSING = _Mark()


class ClientLeft(Exception):
    """The client has disconnected before its answer began."""


async def unless_left(request: Request, work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work`, which is cancelled when the client disconnects. The request's body must have been read.

    Raises:
        ClientLeft: the client has disconnected.
    """
    results: list[T] = []
    failure: Exception | None = None

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        try:
            results.append(await work())
        except Exception as error:
            failure = error
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if not results:
        raise ClientLeft
    return results[0]


def encoded(data: Any, *, name: str | None = None, event_id: str | None = None) -> bytes:
    """One server-sent event. Numbers that JSON does not have are null."""
    head = (f"id: {event_id}\n" if event_id else "") + (f"event: {name}\n" if name else "")
    return head.encode() + b"data: " + msgspec.json.encode(data) + b"\n\n"


class Source(Protocol):
    """What a stream reads: a trace, a subscription or a watch."""

    async def __anext__(self) -> Any: ...
    async def aclose(self) -> None: ...


class Streams:
    """The streams of one gateway, which end when it stops."""

    def __init__(self, *, keep_alive_s: float, stall_s: float) -> None:
        self.keep_alive_s = keep_alive_s
        self.stall_s = stall_s
        self._open: set[EventSource] = set()
        self._over = anyio.Event()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, stream: EventSource) -> None:
        """Count a stream that begins."""
        self._open.add(stream)

    def discard(self, stream: EventSource) -> None:
        """Forget a stream that has ended."""
        self._open.discard(stream)
        if not self._open:
            self._over.set()
            self._over = anyio.Event()

    async def wait_over(self) -> None:
        """Wait until no stream is open."""
        while self._open:
            await self._over.wait()

    def close(self) -> None:
        """Have all streams end with their place to go on from."""
        for stream in list(self._open):
            stream.close()


class EventSource(Response):
    """A stream of server-sent events from a `Source`, which it closes at the end."""

    media_type = "text/event-stream"

    def __init__(self, streams: Streams, source: Source, headers: Mapping[str, str] | None = None) -> None:
        self.status_code = 200
        self.background = None
        # nginx would collect what should leave at once.
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no", **(headers or {})})
        self._streams = streams
        self._source = source
        self._closing = False
        self._waiting: anyio.CancelScope | None = None
        #: When the send began that has not returned yet.
        self._sending: float | None = None

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        """Set the headers of an answer without a length."""
        self.raw_headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in {"Content-Type": "text/event-stream; charset=utf-8", **(headers or {})}.items()
        ]

    @abstractmethod
    def chunks(self) -> AsyncGenerator[bytes]:
        """The events as they leave."""

    def close(self) -> None:
        """Have the stream end: it reads `CLOSING` next."""
        self._closing = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def next(self) -> Any:
        """The next event of the source, `SILENCE` or `CLOSING`.

        A read that is given up loses nothing: the next one goes on where it was.

        Raises:
            StopAsyncIteration: the source is over.
        """
        if not self._closing:
            if self._is_ready():
                # What a limit on the waiting costs is saved.
                return await self._source.__anext__()
            try:
                with anyio.move_on_after(self._streams.keep_alive_s) as self._waiting:
                    return await self._source.__anext__()
            finally:
                self._waiting = None
        return self._silence()

    def _is_ready(self) -> bool:
        """Whether the next event is here, so that the chunks before it can leave with it."""
        return getattr(self._source, "_ready", False)

    def _silence(self) -> _Mark:
        return CLOSING if self._closing else SILENCE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the source is over, the client has left, or the client has stalled."""
        self._streams.add(self)
        failure: Exception | None = None
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._await_disconnect, receive, group.cancel_scope)
                group.start_soon(self._await_stall, group.cancel_scope)
                try:
                    await self._send(send)
                except Exception as error:
                    failure = error
                group.cancel_scope.cancel()
        finally:
            self._streams.discard(self)
            with anyio.CancelScope(shield=True):
                await self._source.aclose()
        if failure is not None:
            raise failure

    async def _await_disconnect(self, receive: Receive, scope: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    async def _await_stall(self, scope: anyio.CancelScope) -> None:
        """End the stream when one send has taken `stall_s`. A time limit on each send would cost more than the send."""
        seconds = self._streams.stall_s
        while True:
            await anyio.sleep(seconds / 4)
            if self._sending is not None and monotonic() - self._sending >= seconds:
                logger.info("a reader has taken nothing for %g s and is disconnected", seconds)
                scope.cancel()
                return

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        held: list[bytes] = []
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                held.append(chunk)
                if len(held) < _CHUNKS_PER_WRITE and len(chunk) < _LARGE and self._is_ready():
                    # Most of the cost of a small chunk is its write.
                    continue
                if len(held) == _CHUNKS_PER_WRITE:
                    # The server notices on its event loop that a client has left, which a burst of events keeps busy.
                    await anyio.lowlevel.checkpoint()
                self._sending = monotonic()
                await send({"type": "http.response.body", "body": b"".join(held), "more_body": True})
                self._sending = None
                held.clear()
        await send({"type": "http.response.body", "body": b"".join(held), "more_body": False})
