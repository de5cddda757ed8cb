"""Leases of clients. A client renews its lease; once the lease has expired, engines cancel the client's traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tracewire_bus.transport.link import Link, ask_once
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.scripts import Script

from .keys import Keys

__all__ = ["RENEW", "Leases"]

#: Sets a key that expires, even if Redis has no memory left: `RENEW((key,), value, milliseconds)`.
RENEW: Final = Script("renew")


class Leases:
    """The leases of all clients of a bus."""

    def __init__(self, connections: Connections, keys: Keys) -> None:
        self._connections = connections
        self._keys = keys

    async def renew(self, lease: str, seconds: float, link: Link | None = None) -> None:
        """Make a lease expire `seconds` from now. A call over a `link` is tried once and not repeated.

        Raises:
            BusUnavailable: Redis does not answer; with a `link`, at the first try.
            BusError: Redis refuses.
        """
        command = RENEW((self._keys.lease(lease),), "", max(1, round(seconds * 1000)))
        if link is None:
            await self._connections.command(*command)
        else:
            await ask_once(link, command)

    async def release(self, lease: str) -> None:
        """End a lease."""
        await self._connections.command("DEL", self._keys.lease(lease))

    async def held(self, leases: Sequence[str]) -> set[str]:
        """Those of these leases that have not expired."""
        if not leases:
            return set()
        replies = await self._connections.commands(
            *(("EXISTS", self._keys.lease(lease).encode("utf-8", "surrogateescape")) for lease in leases)
        )
        return {lease for lease, reply in zip(leases, replies, strict=True) if reply}
