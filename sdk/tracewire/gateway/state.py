"""What the requests of one gateway share: its client, keys, limits and streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import anyio
from fastapi import Depends
from starlette.requests import HTTPConnection

from tracewire import Client, UnknownModel, UnknownTrace

from .admissions import Admissions
from .detached import DetachedTokens
from .keys import EVERYBODY, Caller, Keys, Right
from .limits import Limits
from .measured import SteerTimes
from .metrics import Metrics
from .problems import RETRY_AFTER_S, Problem
from .settings import Settings
from .streams import Streams
from .value_index import ValueIndex

__all__ = ["Gateway", "TheCaller", "TheGateway", "needs"]


class Gateway:
    """The state of one gateway.

    Attributes:
        sockets: the scopes of the WebSockets that end with their trace.
        endless: those of the others, whose clients go on at another gateway.
        closing: whether the gateway takes no new requests.
        recordings: has one recording read after the other.
        running: how many requests run, streams included.
    """

    def __init__(self, client: Client, settings: Settings, keys: Keys) -> None:
        self.client = client
        self.settings = settings
        self.keys = keys
        self.limits = Limits(settings.concurrency)
        self.detached = DetachedTokens(client, self.limits)
        self.admissions = Admissions(keys, age_s=settings.keys_age_s)
        self.streams = Streams(keep_alive_s=settings.keep_alive_s, stall_s=settings.stall_s)
        self.sockets: set[anyio.CancelScope] = set()
        self.endless: set[anyio.CancelScope] = set()
        self.metrics = Metrics()
        self.steer_times = SteerTimes()
        self.values = ValueIndex()
        self.recordings = anyio.CapacityLimiter(1)
        self.closing = False
        self.running = 0
        self._idle = anyio.Event()
        self._draining: anyio.CancelScope | None = None
        #: The base models of LoRA adapters, as they were last found.
        self._bases: dict[str, str] = {}

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request for as long as it runs."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()
                self._idle = anyio.Event()

    async def drain(self) -> None:
        """Take no new requests, and wait for those that run: up to `drain_s`, and then a moment for streams' ends."""
        self.closing = True
        for scope in list(self.endless):
            scope.cancel()
        with anyio.move_on_after(self.settings.drain_s) as self._draining:
            await self._until_idle()
        self.streams.close()
        for scope in list(self.sockets):
            scope.cancel()
        with anyio.move_on_after(RETRY_AFTER_S):
            await self._until_idle()

    def hurry(self) -> None:
        """Wait no longer for the requests that run."""
        if self._draining is not None:
            self._draining.cancel()

    async def _until_idle(self) -> None:
        while self.running:
            await self._idle.wait()

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Give the bus `patience_s` to answer.

        Raises:
            Problem: it has not answered by then.
        """
        seconds = self.settings.patience_s
        with anyio.move_on_after(seconds) as limited:
            yield
        if limited.cancelled_caught:
            raise Problem(
                503,
                f"the bus has not answered within {seconds:g} s; it may have taken the request",
                code="bus_unavailable",
                retry_after=RETRY_AFTER_S,
            )

    def base_of(self, name: str) -> tuple[str, str | None]:
        """The model that a request names, and the LoRA adapter if the name is known to be that of one."""
        base = self._bases.get(name)
        return (name, None) if base is None else (base, name)

    async def find_base(self, error: UnknownModel) -> tuple[str, str]:
        """The model and the adapter where a request's model is a LoRA adapter's name.

        Raises:
            UnknownModel: it is not.
        """
        self._bases.pop(error.model, None)
        models = await self.client.models.list()
        for info in models:
            if error.model in info.loras:
                self._bases[error.model] = info.name
                return info.name, error.model
        raise UnknownModel(error.model, [info.name for info in models])

    def admit_order(self, caller: Caller, text: str) -> None:
        """Check an order over a WebSocket against the limits of its key, as a request is checked.

        Raises:
            Problem: the order is too large, or the key has used up a rate.
        """
        most = caller.body_bytes or self.settings.body_bytes
        if len(text) > most or len(text.encode("utf-8", "replace")) > most:
            raise Problem(413, f"an order of this key may have {most} bytes", code="body_too_large")
        self.limits.order(caller)

    def check_visible(self, caller: Caller, trace_id: str) -> None:
        """Check that a caller may see a trace.

        Raises:
            UnknownTrace: the trace is another tenant's.
        """
        if not caller.sees(trace_id):
            raise UnknownTrace(trace_id)


# FastAPI would run dependencies that are not coroutines on threads, which takes longer than they do.


async def _gateway(connection: HTTPConnection) -> Gateway:
    gateway: Gateway = connection.app.state.gateway
    return gateway


async def _caller(connection: HTTPConnection) -> Caller:
    return connection.scope.get("tracewire.caller", EVERYBODY)  # type: ignore[no-any-return]


TheGateway = Annotated[Gateway, Depends(_gateway)]
TheCaller = Annotated[Caller, Depends(_caller)]


def needs(right: Right) -> Any:
    """A route's dependency on a right of the caller's key."""

    async def check(caller: TheCaller) -> None:
        caller.require(right)

    check.right = right  # type: ignore[attr-defined]
    return Depends(check)
