"""What becomes of all traces, for dashboards and whoever reacts to every end: see `Client.watch`."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import anyio

from tracewire_bus.firehose import GroupWatch, Lifecycle
from tracewire_bus.firehose import Watch as BusWatch
from tracewire_bus.streams import BusError

from .errors import bus_errors, connect_error

__all__ = ["Watch"]


class Watch:
    """An async iterator of [`Lifecycle`][tracewire.Lifecycle] events, and an async context manager. It has no end.

    A trace's events come in their order. Reading begins with `start()`, with entering, or with the first event;
    `since="now"` means that moment. It owns no task: what is not asked for is not read.
    """

    def __init__(self, watch: BusWatch | GroupWatch, model: str | None) -> None:
        self._watch = watch
        self._model = model
        self._closed = False

    @property
    def position(self) -> str:
        """Where it is, as a text for `client.watch(since=...)`: nothing is left out or repeated from there on.

        `""` before it has started, and for a watch of a group, which remembers that by itself.
        """
        return self._watch.position if isinstance(self._watch, BusWatch) else ""

    async def start(self) -> None:
        """Settle where it begins, or join its group. A second call does nothing.

        Raises:
            ConnectError: Redis refuses, or the client is closed.
        """
        with bus_errors():
            await self._watch.start()

    async def aclose(self) -> None:
        """Stop reading. Idempotent, and finishes even when cancelled."""
        self._closed = True
        with anyio.CancelScope(shield=True):
            await self._watch.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Lifecycle:
        """The next event, when there is one.

        Raises:
            StopAsyncIteration: it was closed.
            ConnectError: Redis refuses, the client was closed, or the group removed.
        """
        while True:
            if self._closed:
                raise StopAsyncIteration
            try:
                event = await anext(self._watch)
            except (anyio.ClosedResourceError, BusError) as error:
                if self._closed:
                    raise StopAsyncIteration from None
                raise connect_error(error) from error
            if self._model is None or event.model == self._model:
                return event
