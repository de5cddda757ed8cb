"""Hosts that have ended, until the save relay has said what it has passed on of their requests."""

from __future__ import annotations

import time

from tracewire_engine.protocol.save_relay import Relayed

from .host import BlockHost
from .relay_link import RelayLink, RelayLost

__all__ = ["EndedHosts"]

#: How long the save relay may take to say it, in seconds.
_ANSWER_S = 5.0


class EndedHosts:
    """The hosts of which a relay was asked. Their requests end when it has answered, or is late, or has ended."""

    def __init__(self) -> None:
        self._asked: dict[BlockHost, float] = {}

    def __contains__(self, host: BlockHost) -> bool:
        return host in self._asked

    def ask(self, host: BlockHost, *, trusted: bool) -> bool:
        """Ask the relay of a host. Returns whether there is one that will answer.

        `trusted`: whether the relay passes on what the host has still sent.
        """
        if host.saves is None:
            return False
        self._asked[host] = time.monotonic()
        try:
            host.saves.ask(trusted=trusted)
        except RelayLost:
            self.take(host, None)
            return False
        return True

    def take(self, host: BlockHost, passed: list[Relayed] | None) -> bool:
        """Count what the relay has passed on of a host's requests. Returns whether the relay was asked of the host.

        If that is not known (`None`), the requests end with the step that the host was told of last.
        """
        if self._asked.pop(host, None) is None:
            return False
        for relayed in passed or ():
            one = host.records.get((relayed.request, relayed.choice))
            if one is not None:
                one.index, one.steps = max(one.index, relayed.index), one.steps + relayed.steps
                one.ended = one.ended or relayed.ended
        told = {} if passed is not None else {request_id: index for request_id, _, index in host.begun}
        for one in host.records.values():
            one.index = max(one.index, told.get(one.id, -1))
        return True

    def late(self) -> list[BlockHost]:
        """The hosts of which the relay has not said it in time."""
        before = time.monotonic() - _ANSWER_S
        return [host for host, since in self._asked.items() if since < before]

    def of(self, relay: RelayLink) -> list[BlockHost]:
        """The hosts of which this relay was asked."""
        return [host for host in self._asked if host.saves is not None and host.saves.link is relay]

    def forget(self, host: BlockHost) -> None:
        """Forget a host that has no trace left."""
        self._asked.pop(host, None)
