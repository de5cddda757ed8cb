"""What stands before every route: keys, limits, the size of bodies, and the count of requests."""

from __future__ import annotations

import logging
from time import monotonic
from typing import Any

import anyio
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tracewire_bus.domain.identity import acting_for
from tracewire_bus.log_fields import add_log_fields

from .browser_sockets import authorization_of, check_host, check_origin, header_of
from .dashboard_files import is_dashboard
from .problems import RETRY_AFTER_S, Problem
from .state import Gateway
from .streams import encoded

__all__ = ["OPEN", "Guard"]

logger = logging.getLogger("tracewire.gateway")

#: The routes that need no key.
OPEN = frozenset({"/healthz", "/readyz"})
#: How long a client has to take a stream's last event, in seconds.
_LAST_S = 1.0
#: The methods that change nothing.
_READING = frozenset({"GET", "HEAD", "OPTIONS"})


class Guard:
    """An ASGI app that lets a request with a valid key through to `app`, within the key's limits.

    A route that does not exist is answered like any other, so that a caller without a key learns nothing of them.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or one WebSocket."""
        if scope["type"] == "lifespan" or scope["path"] in OPEN or is_dashboard(scope["path"]):
            await self._app(scope, receive, send)
            return
        gateway: Gateway = scope["app"].state.gateway
        request = _Counted(gateway, scope, send)
        with gateway.counted():
            try:
                await self._admit(gateway, scope, receive, request)
            finally:
                request.over()

    async def _admit(self, gateway: Gateway, scope: Scope, receive: Receive, request: _Counted) -> None:
        try:
            if gateway.closing:
                raise Problem(503, "the gateway stops", code="gateway_closing", retry_after=RETRY_AFTER_S)
            if not gateway.keys.can_change:
                check_host(scope, gateway.settings.cors)
            authorization = authorization_of(scope)
            # A page of any origin can send a request without a key that changes something. It cannot read the answer.
            if scope["type"] == "websocket" or (authorization is None and scope["method"] not in _READING):
                check_origin(scope, gateway.settings.cors)
            caller = gateway.keys.caller(authorization)
            # The path names the trace, where a trace exists already.
            add_log_fields(client=caller.name, path=scope["path"])
            with gateway.limits.request(caller):
                scope["tracewire.caller"] = caller
                # What the gateway signs in this request is for the caller's tenant.
                acting_for.set(caller.tenant)
                body = _Body(scope, receive, caller.body_bytes or gateway.settings.body_bytes)
                with gateway.admissions.request(caller) as admitted:
                    await self._app(scope, body.receive, request.send)
                if admitted.cancelled_caught:
                    logger.info("the key %r holds no longer: a request of it was ended", caller.name)
                    await request.withdrawn()
        except Problem as problem:
            # Only from here: what a route raises is answered by the app. A WebSocket gets the same answer.
            await problem.response(scope["path"])(scope, receive, request.send)


async def _nothing() -> Message:
    """What a request without a body receives."""
    return {"type": "http.request"}


class _Body:
    """A request's body, up to a limit.

    Raises:
        Problem: its announced length is beyond the limit.
    """

    def __init__(self, scope: Scope, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._size = 0
        length = header_of(scope, b"content-length")
        if length is not None and length.isdecimal() and int(length) > limit:
            raise Problem(413, self._message(), code="body_too_large")

    def _message(self) -> str:
        return f"a body of this key may have {self._limit} bytes"

    async def receive(self) -> Message:
        """The next message of the request.

        Raises:
            HTTPException: the body has more bytes than the limit.
        """
        message = await self._receive()
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            if self._size > self._limit:
                # FastAPI passes this one on, whoever reads the body.
                raise HTTPException(413, self._message())
        return message


class _Counted:
    """One request, as the metrics count it, and as far as it is answered."""

    def __init__(self, gateway: Gateway, scope: Scope, send: Send) -> None:
        self._metrics = gateway.metrics
        self._gateway = gateway
        self._scope = scope
        self._send = send
        self._begun = monotonic()
        self._status = "none"
        self._is_stream = False

    async def send(self, message: Any) -> None:
        """Pass a message on."""
        if message["type"] == "http.response.start":
            self._status = str(message["status"])
            self._is_stream = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
        await self._send(message)

    async def withdrawn(self) -> None:
        """Answer a request that was ended because its key holds no longer; a stream's last event says so.

        The server cuts any other answer that has begun, and its route has closed a WebSocket.
        """
        problem = Problem(401, "the request's API key was withdrawn", code="invalid_api_key")
        path = self._scope["path"]
        if self._scope["type"] != "http" or (self._status != "none" and not self._is_stream):
            return
        if self._status == "none":
            await problem.response(path)(self._scope, _nothing, self.send)
            return
        under_v1 = path.startswith("/v1/")
        last = encoded(problem.openai()) if under_v1 else encoded(problem.details(), name="interrupted")
        with anyio.move_on_after(_LAST_S):
            await self.send({"type": "http.response.body", "body": last})

    def over(self) -> None:
        """Count the request, which has ended."""
        if self._scope["type"] != "http":
            return
        # The route's pattern: a path would be a label for each trace.
        route = getattr(self._scope.get("route"), "path", "other")
        self._metrics.requests.labels(self._scope["method"], route, self._status).inc()
        self._metrics.request_seconds.labels(route).observe(monotonic() - self._begun)
