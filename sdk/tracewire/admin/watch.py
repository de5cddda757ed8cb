"""Lifecycle events of all traces, for dashboards and services that react to every end: see `Client.watch`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from tracewire.checks import check_text
from tracewire.error_mapping import bus_errors
from tracewire.traces.readers import Watcher
from tracewire_bus.store.lifecycle import Lifecycle
from tracewire_bus.store.lifecycle import Watch as BusWatch
from tracewire_bus.store.watch_groups import GroupWatch

from .listing import Listing

if TYPE_CHECKING:
    from tracewire.traces.session import Session

__all__ = ["Watch", "WatchGroups"]


class Watch(Watcher[Lifecycle]):
    """An async iterator of `Lifecycle` events, and an async context manager. It has no end.

    A trace's events come in their order. Reading begins with `start()`, with entering, or with the first event;
    `since="now"` means that moment. It owns no task: what is not asked for is not read.
    """

    def __init__(self, watch: BusWatch | GroupWatch, model: str | None) -> None:
        super().__init__(watch)
        self._model = model

    @property
    def position(self) -> str:
        """Where it is, as a text for `client.watch(since=...)`: nothing is left out or repeated from there on.

        `""` before it has started, and for a watch of a group, which remembers that by itself.
        """
        return self._source.position if isinstance(self._source, BusWatch) else ""

    async def __anext__(self) -> Lifecycle:
        """The next event, when there is one.

        Raises:
            StopAsyncIteration: it was closed.
            BusRefused: Redis refuses.
            UnknownWatchGroup: the group was removed.
            ClientClosed: the client was closed.
        """
        while True:
            event = await self._next()
            if self._model is None or event.model == self._model:
                return event


class WatchGroups:
    """The groups of watches that share events (`client.watch(group=...)`). `Client.watch_groups` is one."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def list(self) -> Listing[str]:
        """Their names."""

        async def pages() -> AsyncIterator[Sequence[str]]:
            with bus_errors():
                names = await self._session.open_bus().watch_groups.names()
            yield names

        return Listing(pages)

    async def remove(self, group: str) -> bool:
        """Remove a group, with the events that it had not acknowledged. Returns whether it existed."""
        with bus_errors():
            return await self._session.open_bus().watch_groups.remove(check_text("group", group))

    def __repr__(self) -> str:
        return "<WatchGroups>"
