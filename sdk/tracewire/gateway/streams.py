"""Answers that are streams of server-sent events, each sent when its reader has room for it."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, Protocol, TypeVar

import anyio
import anyio.lowlevel
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tracewire import TracewireError
from tracewire_bus.transport.loops import Task, Timer, running_loop, wait

__all__ = ["RETRY", "ClientLeft", "EventSource", "Streams", "encoded", "unless_left"]

logger = logging.getLogger("tracewire.gateway")

T = TypeVar("T")

#: How many events leave with one write before other tasks have a turn, where events come faster than they are sent.
_EVENTS_PER_WRITE = 16
#: So many bytes leave without waiting for more.
_LARGE = 16 * 1024
_WAITING = b": waiting\n\n"
#: Has a browser come back after a second when its stream has ended before its time.
RETRY = b"retry: 1000\n\n"


class ClientLeft(Exception):
    """The client has disconnected before its answer began."""


@contextmanager
def _until_left(receive: Receive, scope: anyio.CancelScope) -> Iterator[None]:
    """Enter `scope`, and cancel it when the client disconnects. The request's body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    with scope:
        # A task group costs several times as much as its task.
        watcher = running_loop().create_task(watch(), name="tracewire: until the client leaves")
        try:
            yield
        finally:
            watcher.cancel()


async def unless_left(request: Request, work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work`, which is cancelled when the client disconnects. The request's body must have been read.

    Raises:
        ClientLeft: the client has disconnected.
    """
    with _until_left(request.receive, anyio.CancelScope()):
        return await work()
    raise ClientLeft


def encoded(data: Any, *, name: str | None = None, event_id: str | None = None) -> bytes:
    """One server-sent event. Numbers that JSON does not have are null."""
    head = (f"id: {event_id}\n" if event_id else "") + (f"event: {name}\n" if name else "")
    return b"%bdata: %b\n\n" % (head.encode(), _encode(data))


_encode = msgspec.json.Encoder().encode


class Source(Protocol):
    """What a stream reads: a trace, a subscription or a watch."""

    async def __anext__(self) -> Any: ...
    async def aclose(self) -> None: ...


class Streams:
    """The streams of one gateway, which end when it stops.

    One timer looks after all of them. A stream on which nothing was sent for `keep_alive_s` seconds sends a comment,
    and a reader that takes nothing for `stall_s` seconds is disconnected.
    """

    def __init__(self, *, keep_alive_s: float, stall_s: float) -> None:
        self.keep_alive_s = keep_alive_s
        self.stall_s = stall_s
        self._tick_s = min(keep_alive_s, stall_s) / 4
        self._open: set[EventSource] = set()
        self._over = anyio.Event()
        self._timer: Timer | None = None

    def __len__(self) -> int:
        return len(self._open)

    def add(self, stream: EventSource) -> None:
        """Count a stream that begins."""
        self._open.add(stream)
        if self._timer is None:
            self._set_timer()

    def discard(self, stream: EventSource) -> None:
        """Forget a stream that has ended."""
        self._open.discard(stream)
        if not self._open:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._over.set()
            self._over = anyio.Event()

    def _set_timer(self) -> None:
        loop = running_loop()
        self._timer = loop.call_at(loop.time() + self._tick_s, self._look)

    def _look(self) -> None:
        now = monotonic()
        for stream in self._open:
            stream.look(now, silent=self.keep_alive_s - self._tick_s, stalled=self.stall_s)
        self._set_timer()

    async def wait_over(self) -> None:
        """Wait until no stream is open."""
        while self._open:
            await self._over.wait()

    def close(self) -> None:
        """Have all streams end with their place to go on from."""
        for stream in list(self._open):
            stream.close()


class EventSource(Response):
    """A stream of server-sent events from a `Source`, which it closes at the end.

    A subclass renders the events. What its methods return is sent in the order of their calls.
    """

    media_type = "text/event-stream"

    def __init__(self, streams: Streams, source: Source, headers: Mapping[str, str] | None = None) -> None:
        self.status_code = 200
        self.background = None
        # nginx would collect what should leave at once.
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no", **(headers or {})})
        self._streams = streams
        self._source = source
        #: Ends all, and ends the reading alone.
        self._all = anyio.CancelScope()
        self._reads = anyio.CancelScope()
        self._closing = False
        #: Whether the stream waits for the next event.
        self._reading = False
        #: When the send began that has not returned yet, and when the last one ended.
        self._sending: float | None = None
        self._sent = monotonic()
        self._comment: Task[None] | None = None
        #: What was rendered and not sent yet, and whether it is the end.
        self._held: list[bytes] = []
        self._over = False

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        """Set the headers of an answer without a length."""
        self.raw_headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in {"Content-Type": "text/event-stream; charset=utf-8", **(headers or {})}.items()
        ]

    # --- what subclasses render ---------------------------------------------------------------------------------------

    def opening(self) -> bytes:
        """What is sent before all events."""
        return b""

    @abstractmethod
    async def rendered(self, event: Any) -> bytes:
        """An event of the source as it is sent; nothing if it is left out."""

    async def ending(self) -> bytes:
        """What is sent once the source is over."""
        return b""

    def failed(self, error: TracewireError) -> bytes:
        """What is sent in place of the rest where the source, or the rendering, raises."""
        raise error

    def closed(self) -> bytes:
        """What is sent in place of the rest where the gateway stops."""
        return b""

    # --- its life -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Have the stream end before its next event."""
        self._closing = True
        if self._reading:
            self._reads.cancel()

    def look(self, now: float, *, silent: float, stalled: float) -> None:
        """End a stream whose send has taken `stalled` seconds, and send a comment after `silent` seconds of silence.

        A time limit on each read, or on each send, would cost more than the read and the send do.
        """
        if self._sending is not None:
            if now - self._sending >= stalled:
                logger.info("a reader has taken nothing for %g s and is disconnected", stalled)
                self._all.cancel()
        elif self._reading and not self._closing and now - self._sent >= silent:
            # Its task goes on waiting for the next event.
            self._comment = running_loop().create_task(self._say_waiting(), name="tracewire: a silent stream's comment")

    async def _say_waiting(self) -> None:
        with suppress(OSError):
            await self._pass_on(_WAITING)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the source is over, the client has left, or the client has stalled."""
        self._send = send
        self._streams.add(self)
        try:
            with _until_left(receive, self._all):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                with self._reads:
                    await self._send_events()
                if not self._over:
                    self._held.append(self.closed())
                await self._flush(more=False)
        finally:
            self._streams.discard(self)
            if self._comment is not None:
                self._comment.cancel()
            with anyio.CancelScope(shield=True):
                await self._source.aclose()

    async def _send_events(self) -> None:
        """Send the events as they come, until they are over or the stream closes."""
        held = self._held
        if opening := self.opening():
            held.append(opening)
        try:
            while not self._closing:
                # Most of the cost of a small event is its write: what is here leaves together.
                full = len(held) >= _EVENTS_PER_WRITE
                if full or not self._is_ready() or (held and len(held[-1]) >= _LARGE):
                    if full:
                        # The server notices on its event loop that a client has left, which a burst keeps busy.
                        await anyio.lowlevel.checkpoint()
                    await self._flush()
                self._reading = True
                try:
                    event = await self._source.__anext__()
                except StopAsyncIteration:
                    held.append(await self.ending())
                    self._over = True
                    return
                finally:
                    self._reading = False
                if self._is_closing():
                    return
                if data := await self.rendered(event):
                    held.append(data)
        except TracewireError as error:
            held.append(self.failed(error))
            self._over = True

    def _is_closing(self) -> bool:
        return self._closing

    def _is_ready(self) -> bool:
        """Whether the next event is here."""
        return getattr(self._source, "_ready", False)

    async def _flush(self, *, more: bool = True) -> None:
        """Send what is held. Nothing is lost if the reading is given up meanwhile."""
        if self._comment is not None:
            await wait(self._comment)
            self._comment = None
        data = b"".join(self._held)
        self._held.clear()
        if data or not more:
            await self._pass_on(data, more=more)

    async def _pass_on(self, data: bytes, *, more: bool = True) -> None:
        self._sending = monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._sending, self._sent = None, monotonic()
