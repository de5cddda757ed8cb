"""Turns that the kernel does not take whole."""

from __future__ import annotations

import select
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from tracewire_engine.link.host_channel import ChannelClosed, HostChannel
from tracewire_engine.worker.block_host.unsent_turns import UnsentTurns

MESSAGE = bytes(32 << 20)


def host_of(connection: socket.socket) -> Any:
    return SimpleNamespace(calls=HostChannel(connection), lost=False)


def test_a_turn_is_sent_piece_by_piece_as_it_is_read() -> None:
    ours, theirs = socket.socketpair()
    epoll, host, reader = select.epoll(), host_of(ours), HostChannel(theirs)
    unsent = UnsentTurns(epoll)
    unsent.watch(host)
    assert unsent.at(ours.fileno()) is None
    host.calls.send(MESSAGE)
    unsent.watch(host)
    unsent.watch(host)
    assert unsent.at(ours.fileno()) is host
    came: list[Any] = []
    while not came:
        # Nothing is ready while the kernel holds as much as it takes.
        came = reader.arrived()
        for descriptor, _ in epoll.poll(0):
            found = unsent.at(descriptor)
            assert found is host
            unsent.send(found)
    assert came == [MESSAGE]
    assert unsent.at(ours.fileno()) is None
    assert epoll.poll(0) == []


def test_a_host_that_is_gone_or_forgotten_is_sent_nothing() -> None:
    ours, theirs = socket.socketpair()
    epoll, host = select.epoll(), host_of(ours)
    unsent = UnsentTurns(epoll)
    host.calls.send(MESSAGE)
    unsent.watch(host)
    theirs.close()
    assert epoll.poll(0)
    with pytest.raises(ChannelClosed):
        unsent.send(host)
    unsent.forget(host)
    unsent.forget(host)
    assert epoll.poll(0) == []
    host.lost = True
    unsent.watch(host)
    assert unsent.at(ours.fileno()) is None
