"""Base classes of readers: a caller enters or starts one, iterates over it, and leaves or closes it."""

from __future__ import annotations

from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

import anyio

from tracewire.error_mapping import bus_errors, connect_error
from tracewire_bus.bus import BusError

__all__ = ["Reader", "Watcher"]

Item = TypeVar("Item")
Read = TypeVar("Read", covariant=True)


class Reader:
    """An async context manager and an async iterator: entering it starts it, and leaving it closes it."""

    async def start(self) -> None:
        """Begin to read. A second call does nothing."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Stop reading. Idempotent, and finishes even when cancelled."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self


class Source(Protocol[Read]):
    """A reader of the bus, which a `Watcher` wraps."""

    async def start(self) -> None: ...
    async def aclose(self) -> None: ...
    async def __anext__(self) -> Read: ...


class Watcher(Reader, Generic[Item]):
    """An endless reader with a connection of its own. It owns no task, and reads only when the caller asks."""

    def __init__(self, source: Source[Item]) -> None:
        self._source = source
        self._closed = False

    async def start(self) -> None:
        """Fix the position at which reading begins. A second call does nothing.

        Raises:
            BusRefused: Redis refuses.
            ClientClosed: the client is closed.
        """
        with bus_errors():
            await self._source.start()

    async def aclose(self) -> None:
        """Stop reading. Idempotent, and finishes even when cancelled."""
        self._closed = True
        with anyio.CancelScope(shield=True):
            await self._source.aclose()

    async def _next(self) -> Item:
        """Wait for the next item, and return it."""
        if self._closed:
            raise StopAsyncIteration
        try:
            return await anext(self._source)
        except (anyio.ClosedResourceError, BusError) as error:
            if self._closed:
                raise StopAsyncIteration from None
            raise connect_error(error) from error
