"""The Redis of a bus, as it describes itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracewire.error_mapping import bus_errors
from tracewire_bus.store.server_info import ServerInfo, ask_server

if TYPE_CHECKING:
    from tracewire.traces.session import Session

__all__ = ["Server", "ServerInfo"]


class Server:
    """The Redis of the bus. Available as `Client.server`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def info(self) -> ServerInfo:
        """The version of Redis, the settings that matter to a bus, and how far its clock is ahead of this machine's.

        Raises:
            BusRefused: the user may not ask for it (`INFO`, `TIME`).
            BusUnavailable: Redis does not answer.
        """
        with bus_errors():
            return await ask_server(self._session.open_bus().command)

    def __repr__(self) -> str:
        return "<Server>"
