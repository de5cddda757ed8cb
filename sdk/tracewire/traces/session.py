"""What a client shares with its handles: the bus, the lease, the registry as it was read, and the background queue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import anyio

from tracewire.errors import ClientClosed, TracewireError
from tracewire_bus.transport.tasks import PerTickLimiter

from .background import BackgroundSubmissions, QueuedSubmission
from .presence import Presence
from .served_models import ServedModels

if TYPE_CHECKING:
    from tracewire_bus.bus import Bus

__all__ = ["Session", "running_loop"]

#: How many of the traces that are started at the same time are made in one turn of the event loop.
_TRACES_PER_TICK = 8


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs here, if one does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class Session:
    """One connected client, as its traces, subscriptions and edits see it.

    Attributes:
        url: URL of its Redis.
        name: name of the client, which engines and other clients see.
        presence: its lease, and the deadlines of its traces.
        models: the registry as it was last read.
        turns: spreads traces that are started at the same time over turns of the event loop, so that the client sends
            the first while it still makes the others.
    """

    def __init__(self, bus: Bus, name: str, presence: Presence, loop: asyncio.AbstractEventLoop) -> None:
        self.url = bus.url
        self.name = name
        self.presence = presence
        self.models = ServedModels(self.open_bus)
        self.turns = PerTickLimiter(_TRACES_PER_TICK)
        self._bus: Bus | None = bus
        self._loop = loop
        self._submissions: BackgroundSubmissions | None = None
        self._closing = False

    @property
    def closed(self) -> bool:
        """Whether the client is closed."""
        return self._bus is None

    def open_bus(self) -> Bus:
        """The bus.

        Raises:
            ClientClosed: the client is closed.
            TracewireError: another event loop runs here than the client's.
        """
        if self._bus is None:
            raise ClientClosed("the client is closed")
        if running_loop() not in (None, self._loop):
            # The client's connections break if another loop uses them.
            raise TracewireError(
                "the client belongs to another event loop: connect() in each, or call it by anyio.from_thread.run"
            )
        return self._bus

    def queue(self, trace_id: str, submit: Callable[[], Awaitable[None]]) -> QueuedSubmission:
        """Have a trace submitted in the background by `submit`; `aclose` waits for it."""
        bus = self.open_bus()
        if self._submissions is None:
            self._submissions = BackgroundSubmissions(bus.patience_s)
        return self._submissions.add(trace_id, submit)

    async def aclose(self) -> None:
        """Submit the traces that are queued, give the lease up, and disconnect. A second call does nothing."""
        bus, self._closing = None if self._closing else self._bus, True
        if bus is None:
            return
        try:
            if self._submissions is not None:
                await self._submissions.drain()
        finally:
            with anyio.CancelScope(shield=True):
                if self._submissions is not None:
                    await self._submissions.aclose()
                self._bus = None
                await self.presence.aclose()
                await bus.aclose()
