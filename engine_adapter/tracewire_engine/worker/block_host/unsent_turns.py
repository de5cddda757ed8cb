"""Sends hosts the rest of turns that the kernel did not take whole.

While the model runs, each further turn sends what waits. When the model comes to rest, no turn follows, and a host
reports nothing before it has the turn.
"""

from __future__ import annotations

import contextlib
import select

from .host import BlockHost

__all__ = ["UnsentTurns"]


class UnsentTurns:
    """The hosts to which a part of a turn is still to be sent.

    Args:
        epoll: of the thread that sends it: a host's connection is ready when the kernel takes more.
    """

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self._hosts: dict[int, BlockHost] = {}

    def watch(self, host: BlockHost) -> None:
        """Send a host what it was told, as it takes it."""
        descriptor = host.calls.fileno()
        if host.calls.unsent and not host.lost and descriptor >= 0 and descriptor not in self._hosts:
            self._hosts[descriptor] = host
            self._epoll.register(descriptor, select.EPOLLOUT)

    def forget(self, host: BlockHost) -> None:
        """Send a host nothing more. Called before its connection is closed."""
        for descriptor, one in list(self._hosts.items()):
            if one is host:
                del self._hosts[descriptor]
                with contextlib.suppress(OSError):
                    self._epoll.unregister(descriptor)

    def at(self, descriptor: int) -> BlockHost | None:
        """The host whose connection has this descriptor, if something is to be sent to it."""
        return self._hosts.get(descriptor)

    def send(self, host: BlockHost) -> None:
        """Send a host more.

        Raises:
            ChannelClosed: the host is gone.
        """
        host.calls.flush()
        if not host.calls.unsent:
            self.forget(host)
