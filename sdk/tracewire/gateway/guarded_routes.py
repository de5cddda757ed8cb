"""Routes that check a key's right before they read a body, and count the body's values before they decode it."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeVar

import anyio.to_thread
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from tracewire_bus.domain.limits import MAX_CONTAINERS, MAX_VALUES

from .keys import EVERYBODY
from .problems import Problem
from .streams import ClientLeft

__all__ = ["GuardedRoute", "count_values"]

T = TypeVar("T")

#: From this size in bytes, a body is counted and decoded on a thread.
_LARGE: Final = 64 * 1024


class GuardedRoute(APIRoute):
    """A route that checks the right of a key before it reads the body, and counts values before it decodes them."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See `APIRoute`."""
        handle = super().get_route_handler()
        rights = [right for one in self.dependencies if (right := getattr(one.dependency, "right", None)) is not None]

        async def guarded(request: Request) -> Response:
            caller = request.scope.get("tracewire.caller", EVERYBODY)
            for right in rights:
                caller.require(right)
            if self.body_field is None:
                return await handle(request)
            try:
                body = await request.body()
            except ClientDisconnect as error:
                raise ClientLeft from error
            work = partial(count_values, body, openai=request.url.path.startswith("/v1/"))
            await _done(work, body)
            return await handle(_Request(request.scope, request.receive, body))

        return guarded


class _Request(Request):
    """A request whose body was read and counted."""

    def __init__(self, scope: Scope, receive: Receive, body: bytes) -> None:
        super().__init__(scope, receive)
        self._body = body

    async def json(self) -> Any:
        """See `Request`. JSON is UTF-8: `json.loads` would take bytes of UTF-16, too, which were not counted."""
        return await _done(lambda: json.loads(self._body.decode("utf-8-sig")), self._body)


async def _done(work: Callable[[], T], body: bytes) -> T:
    """The result of `work` on a body: of a large one, on a thread."""
    return work() if len(body) < _LARGE else await anyio.to_thread.run_sync(work)


def count_values(body: bytes, *, openai: bool = False) -> None:
    """Count the values of a JSON text without decoding it. The decoder refuses a text that is no JSON.

    Raises:
        Problem: it has more values, or more lists and objects, than a submission may have.
    """
    # Behind these, each quote begins or ends a text.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    values = containers = at = 0
    while at >= 0:
        quote = plain.find(b'"', at)
        end = quote if quote >= 0 else len(plain)
        containers += plain.count(b"[", at, end) + plain.count(b"{", at, end)
        # A comma or a colon stands before each value but the first one of a list or an object.
        values += plain.count(b",", at, end) + plain.count(b":", at, end)
        if containers > MAX_CONTAINERS or values + containers > MAX_VALUES:
            raise Problem(
                400 if openai else 422,
                f"the body has more than {MAX_VALUES:,} values, or more than {MAX_CONTAINERS:,} lists and objects; "
                'send many numbers as one array: {"dtype", "shape", "base64"}',
                code="too_many_values",
            )
        # Behind the text.
        at = plain.find(b'"', quote + 1) + 1 if quote >= 0 else -1
        if at == 0:
            return
