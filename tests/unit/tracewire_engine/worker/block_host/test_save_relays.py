"""The relay that takes new hosts, and those before it."""

from __future__ import annotations

import os
import select
import socket

import pytest

from tracewire_engine.protocol.save_relay import Settings
from tracewire_engine.worker.block_host.relay_link import RelayLink, RelayLost, SaveEnds
from tracewire_engine.worker.block_host.save_relays import SaveRelays


def test_another_relay_takes_new_hosts_when_one_has_ended() -> None:
    others: list[socket.socket] = []

    def start() -> RelayLink:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        others.append(theirs)
        return RelayLink(control, Settings(""))

    with select.epoll() as epoll:
        relays = SaveRelays(start, epoll)
        assert len(others) == 1
        first = relays.open(SaveEnds(*os.pipe()))
        assert relays.open(SaveEnds(*os.pipe())).link is first.link
        others[0].close()
        # Whether the worker has heard of it or not.
        given = SaveEnds(*os.pipe())
        second = relays.open(given)
        assert second.link is not first.link
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(given.connection)
        assert relays.open(SaveEnds(*os.pipe())).link is second.link
        ((descriptor, _),) = epoll.poll(30)
        assert relays.at(descriptor) is first.link
        assert relays.at(-1) is None
        with pytest.raises(RelayLost):
            first.link.hear()
        relays.drop(first.link)
        assert epoll.poll(0) == []
        relays.close()
        assert others[1].recv(1 << 16)
        assert second.link.lost
