"""A client's connection, with a bound on the bytes of a request's head and on the time that the head takes."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

__all__ = ["MOST_HEAD", "HttpConnection"]

#: The most bytes of a request's line and headers.
MOST_HEAD: Final = 64 * 1024
_TOO_LARGE: Final = b"the line and the headers of a request may have %d bytes" % MOST_HEAD


class HttpConnection(HttpToolsProtocol):
    """uvicorn's, which bounds neither the bytes of a request's head nor the time that the head takes.

    `head_s`: how long a request's head may take, and what is left of a body that its request does not want. A request
    that is served has all the time that it takes.
    """

    def __init__(self, *args: Any, head_s: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_s = head_s
        self._timer: asyncio.TimerHandle | None = None
        #: Whether a head is being read, and the bytes of its address and its whole headers.
        self._in_head = False
        self._size = 0
        #: The bytes that have come since the parser told of the head's beginning.
        self._partial = 0
        self._upgraded = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The client has connected."""
        super().connection_made(transport)
        self._begin_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read what the client has sent."""
        was_in_head = self._in_head
        if was_in_head:
            # The parser tells of a header only once it is whole.
            self._partial += len(data)
        super().data_received(data)
        if self._upgraded or self.transport.is_closing():
            return
        if self._in_head and was_in_head and self._partial > MOST_HEAD:
            self._refuse()
        elif not self._is_busy() and self._timer is None and self.timeout_keep_alive_task is None:
            self._begin_timer()

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._in_head, self._size, self._partial = True, 0, 0

    def on_url(self, url: bytes) -> None:
        """The head has a part of an address."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """The head has a header."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is whole."""
        super().on_message_complete()
        if not self._upgraded and not self._is_busy():
            # Its answer has been sent before, and the rest of its body has ended the wait for another request.
            self._stop_timer()
            self._unset_keepalive_if_required()
            wait_s, handler = self.timeout_keep_alive, self.timeout_keep_alive_handler
            self.timeout_keep_alive_task = self.loop.call_later(wait_s, handler)

    def handle_websocket_upgrade(self) -> None:
        """The connection is a WebSocket's."""
        self._upgraded = True
        self._stop_timer()
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, or one whose head is too large."""
        if self._size > MOST_HEAD:
            self._refuse()
        else:
            super().send_400_response(msg)

    def _refuse(self) -> None:
        if self._is_busy():
            # This would stand in the middle of the answer to the request before.
            self.transport.close()
            return
        head = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
        more = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(_TOO_LARGE)
        self.transport.write(head + more + _TOO_LARGE)
        self.transport.close()

    def _count(self, size: int) -> None:
        self._size += size
        if self._size > MOST_HEAD:
            # The parser stops, and has `send_400_response` called.
            raise ValueError("the head is too large")

    def _is_busy(self) -> bool:
        """Whether a request is served."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _begin_timer(self) -> None:
        self._timer = self.loop.call_later(self._head_s, self._close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        self._timer = None
        if not self._is_busy() and not self.transport.is_closing():
            self.transport.close()
