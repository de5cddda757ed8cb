"""The save relays of a worker: one that takes new hosts, and those before it that have ended."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable

from .relay_link import RelayedSaves, RelayLink, RelayLost, SaveEnds

__all__ = ["SaveRelays"]


class SaveRelays:
    """The relays.

    Args:
        start: starts a relay. Called at once, so that no step waits for it, and again when the one before has ended.
        epoll: watches the connections.
    """

    def __init__(self, start: Callable[[], RelayLink], epoll: select.epoll) -> None:
        self._start, self._epoll = start, epoll
        self._links: dict[int, RelayLink] = {}
        self._last = self._started()

    def _started(self) -> RelayLink:
        link = self._start()
        self._links[link.fileno()] = link
        self._epoll.register(link, select.EPOLLIN)
        return link

    def open(self, ends: SaveEnds) -> RelayedSaves:
        """Have a relay take a host's saves. Closes this process's ends.

        Raises:
            OSError: no relay could be started.
        """
        try:
            if not self._last.lost:
                with contextlib.suppress(RelayLost):
                    return self._last.open(ends)
            self._last = self._started()
            return self._last.open(ends)
        finally:
            ends.close()

    def at(self, descriptor: int) -> RelayLink | None:
        """The relay whose connection has this descriptor, if there is one."""
        return self._links.get(descriptor)

    def look(self) -> None:
        """Give up relays that do not answer."""
        for link in list(self._links.values()):
            link.look()

    def drop(self, link: RelayLink) -> None:
        """Close the connection to a relay that has ended."""
        del self._links[link.fileno()]
        self._epoll.unregister(link)
        link.close()

    def close(self) -> None:
        """End all relays."""
        for link in list(self._links.values()):
            self.drop(link)
