"""How long a step waits for hosts, and what becomes of those that are gone, too slow or talk nonsense."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from tracewire_bus.wire.messages import Failure
from tracewire_engine.link.host_channel import HostChannel
from tracewire_engine.protocol.block_host import Reply
from tracewire_engine.worker.block_host.host_replies import Patience, wait_for_replies


class Host:
    """A host with a connection, whose other end is the test's."""

    failure: Failure | None = None
    block = None

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.calls, self.end = HostChannel(ours), HostChannel(theirs)
        self.traces = {"one": 1, "other": 2}


def ask(hosts: list[Host], patience: Patience) -> tuple[dict[Any, Reply], dict[Host, str]]:
    failures: dict[Host, str] = {}

    def take(host: Any) -> Reply | None:
        said = [bytes(message) for message in host.calls.arrived()]
        if b"nonsense" in said:
            raise ValueError("no reply")
        return Reply() if b"reply" in said else None

    def fail(host: Any, failure: Failure) -> None:
        host.failure = failure
        failures[host] = failure.message

    some: Any = hosts
    return wait_for_replies(some, patience, take, fail), failures


def test_each_host_that_replies_is_waited_for_and_no_other() -> None:
    calm, gone, odd, slow = (Host() for _ in range(4))
    calm.end.send(b"something else")
    calm.end.send(b"reply")
    odd.end.send(b"nonsense")
    gone.end.close()
    replies, failures = ask([calm, gone, odd, slow], Patience(0.05))
    assert list(replies) == [calm]
    assert set(failures) == {gone, odd, slow}
    assert failures[odd].endswith("ValueError: no reply")
    assert "ran for 0.05 s within one step, while every request waited for it" in failures[slow]
    assert failures[gone].endswith("1 others of its tenant has ended")


def test_a_host_has_half_of_the_time_whatever_the_others_take() -> None:
    one, other = Host(), Host()
    some: Any = [one, other]
    patience = Patience(10.0)
    assert patience.left_s(some[0]) == 10.0
    patience.spend(9.0)
    patience.spend_for(some[0], 4.0)
    assert [patience.left_s(host) for host in some] == pytest.approx([1.0, 5.0])
