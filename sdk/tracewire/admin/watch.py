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
    """An endless async iterator of `Lifecycle` events, and an async context manager.

    A trace's events come in their order. Reading begins with `start()`, with entering, or with the first event;
    `since="now"` means that moment. The watch owns no task and reads an event only when the caller asks for it.
    """

    def __init__(self, watch: BusWatch | GroupWatch, model: str | None) -> None:
        super().__init__(watch)
        self._model = model

    @property
    def position(self) -> str:
        """The watch's position, for `client.watch(since=...)`: a watch from there neither skips nor repeats an event.

        `""` before the watch has started, and for a watch of a group, whose position Redis keeps.
        """
        return self._source.position if isinstance(self._source, BusWatch) else ""

    async def __anext__(self) -> Lifecycle:
        """Wait for the next event.

        Raises:
            StopAsyncIteration: the watch was closed.
            BusRefused: Redis refuses.
            UnknownWatchGroup: the group was removed.
            ClientClosed: the client was closed.
        """
        while True:
            event = await self._next()
            if self._model is None or event.model == self._model:
                return event


class WatchGroups:
    """The groups of watches that share events (`client.watch(group=...)`). Available as `Client.watch_groups`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def list(self) -> Listing[str]:
        """The groups' names."""

        async def pages() -> AsyncIterator[Sequence[str]]:
            with bus_errors():
                names = await self._session.open_bus().watch_groups.names()
            yield names

        return Listing(pages)

    async def remove(self, group: str) -> bool:
        """Remove a group and its record of unacknowledged events. Returns whether the group existed."""
        with bus_errors():
            return await self._session.open_bus().watch_groups.remove(check_text("group", group))

    def __repr__(self) -> str:
        return "<WatchGroups>"
