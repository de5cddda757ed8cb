"""Where bulk stores are: each engine writes it to Redis, and consumers read it there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from tracewire_bus.transport.pool import Connections

__all__ = ["BulkStores", "StorePlace"]

#: How long Redis keeps the entry of a store that no engine renews, in seconds. Engines renew it much more often.
_KNOWN_S: Final = 7 * 24 * 3600


class StorePlace(msgspec.Struct, frozen=True):
    """Where a store is.

    Attributes:
        path: the store's folder on the engine's host.
        address: `host:port` at which the engine serves the store; empty if it serves none.
        token: what a consumer shows there.
        archive: the URL of the archive to which the engine moves the segments of ended traces; empty without one.
    """

    path: str
    address: str = ""
    token: str = ""
    archive: str = ""


class BulkStores:
    """The places of all bulk stores of one bus. `key` gives the name of a store's key."""

    def __init__(self, connections: Connections, key: Callable[[str], str]) -> None:
        self._connections = connections
        self._key = key

    async def register(self, store: str, place: StorePlace) -> None:
        """Say where a store is.

        Raises:
            BusError: Redis refuses.
            BusUnavailable: Redis does not answer.
        """
        fields = ("path", place.path, "address", place.address, "token", place.token, "archive", place.archive)
        key = self._key(store)
        await self._connections.commands(("HSET", key, *fields), ("EXPIRE", key, _KNOWN_S))

    async def unregister(self, store: str) -> None:
        """Forget a store.

        Raises:
            BusError: Redis refuses.
            BusUnavailable: Redis does not answer.
        """
        await self._connections.command("DEL", self._key(store))

    async def find(self, store: str) -> StorePlace | None:
        """Where a store is; `None` if Redis does not know.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        found = await self._connections.command("HMGET", self._key(store), "path", "address", "token", "archive")
        if found[0] is None:
            return None
        return StorePlace(*(bytes(field or b"").decode("utf-8", "surrogateescape") for field in found))
