"""What reaches vLLM's HTTP server: routes of an allow-list, bodies up to a size, and so many requests at once.

vLLM's app has routes that change weights, pause the engine or abort other clients' requests, and new versions add
more. So every route that is not listed here is refused, unless the operator allows it.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, Final

__all__ = ["ROUTES", "Fence", "is_public"]

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[Any]]

#: The routes of inference, and those that say whether the server works. A `*` stands for one or more segments.
ROUTES: Final = (
    *("/health", "/ping", "/version", "/load", "/metrics", "/v1/models", "/v1/models/*"),
    *("/v1/completions", "/v1/completions/render", "/v1/chat/completions", "/v1/chat/completions/render"),
    *("/v1/responses", "/v1/responses/*", "/v1/messages", "/v1/messages/count_tokens"),
    *("/tokenize", "/detokenize", "/v1/embeddings", "/v1/score", "/v1/rerank", "/classify", "/pooling"),
)


def is_public(host: str) -> bool:
    """Whether other hosts can reach a server that listens on this address."""
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return True


class _TooLarge(Exception):
    """A request's body is larger than allowed."""


class Fence:
    """An ASGI app that passes on to `app` what is allowed.

    Args:
        app: vLLM's app.
        routes: the allowed paths, as in `ROUTES`.
        body_bytes: how many bytes a request's body may have.
        requests: how many requests may run at once; 0 for any number.
        root_path: a prefix of all paths that a proxy may pass on.
        reached: is called with the name of a limit (`Limits`) when a request reaches it.
    """

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        *,
        routes: Sequence[str],
        body_bytes: int,
        requests: int,
        root_path: str = "",
        reached: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._app = app
        self._exact = frozenset(route for route in routes if not route.endswith("/*"))
        self._below = tuple(route[:-1] for route in routes if route.endswith("/*"))
        self._body_bytes = body_bytes
        self._requests = requests
        self._root_path = root_path
        self._reached = reached
        self._running = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        path = scope["path"].removeprefix(self._root_path)
        if path not in self._exact and not path.startswith(self._below):
            return await _refuse(scope, send, 404, "this engine does not serve this route (--openai-route)")
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        if _length(scope) > self._body_bytes:
            return await self._too_large(scope, receive, send)
        if path in ("/health", "/ping"):
            return await self._app(scope, receive, send)
        if 0 < self._requests <= self._running:
            self._reached("http_requests")
            message = f"{self._running} requests run, and {self._requests} may (--limit http-requests)"
            return await _refuse(scope, send, 429, message, [(b"retry-after", b"1")])
        self._running += 1
        try:
            await self._bounded(scope, receive, send)
        finally:
            self._running -= 1

    async def _bounded(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Call the app with a body of limited size: a request in chunks says no length."""
        size, began = 0, False

        async def counted() -> Any:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b"")) if message["type"] == "http.request" else 0
            if size > self._body_bytes:
                raise _TooLarge
            return message

        async def noted(message: dict[str, Any]) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            await self._app(scope, counted, noted)
        except _TooLarge:
            if not began:
                await self._too_large(scope, receive, send)

    async def _too_large(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        self._reached("http_body_bytes")
        # A client that still sends while the connection is closed would not see the answer. So as much again is read.
        left = self._body_bytes
        while left > 0 and (message := await receive())["type"] == "http.request" and message.get("more_body", False):
            left -= len(message.get("body", b""))
        message = f"a body has at most {self._body_bytes} bytes (--limit http-body-bytes)"
        await _refuse(scope, send, 413, message)


def _length(scope: Mapping[str, Any]) -> int:
    text = dict(scope["headers"]).get(b"content-length", b"0")
    return int(text) if text.isdigit() else 0


async def _refuse(
    scope: Mapping[str, Any], send: Send, status: int, message: str, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    if scope["type"] == "websocket":
        return await send({"type": "websocket.close", "code": 1008})
    body = json.dumps({"error": {"message": message, "type": "invalid_request_error", "code": status}}).encode()
    found = [(b"content-type", b"application/json"), (b"connection", b"close"), *headers]
    await send({"type": "http.response.start", "status": status, "headers": found})
    await send({"type": "http.response.body", "body": body})
