"""The worker's end of the save relay."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import msgspec
import pytest

from tracewire_engine.link.host_channel import receive_descriptors, send_descriptors
from tracewire_engine.link.turn_counts import TurnCounts
from tracewire_engine.protocol.save_relay import (
    RELAYED,
    Closed,
    Expected,
    Lost,
    Opened,
    Order,
    Over,
    Passed,
    Refused,
    Relayed,
    Settings,
)
from tracewire_engine.worker.block_host import relay_link
from tracewire_engine.worker.block_host.relay_link import RelayLink, RelayLost, SaveEnds


class Relay:
    """The other end."""

    def __init__(self) -> None:
        control, self.control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(30)
        self.link = RelayLink(control, Settings("somewhere"))
        message, (counts,) = receive_descriptors(self.control)
        assert msgspec.msgpack.decode(message, type=Order) == Settings("somewhere")
        self.counts = TurnCounts(counts)

    def told(self) -> Any:
        message, descriptors = receive_descriptors(self.control)
        for one in descriptors:
            os.close(one)
        return msgspec.msgpack.decode(message, type=Order)

    def say(self, said: Passed | Refused) -> None:
        send_descriptors(self.control, msgspec.msgpack.encode(said), [])


def ends() -> SaveEnds:
    return SaveEnds(*os.pipe())


def test_the_relay_knows_what_to_expect_before_a_host_is_told() -> None:
    relay = Relay()
    given = ends()
    saves = relay.link.open(given)
    given.close()
    assert relay.told() == Opened(0)
    saves.allow(1)
    assert relay.counts[0] == 1
    names = [(f"r{number}", 0) for number in range(RELAYED + 1)]
    for name in names:
        saves.expect(*name)
    saves.over("earlier", 1)
    saves.allow(2, 1)
    assert [relay.told() for _ in range(3)] == [
        Over(0, [("earlier", 1)]),
        Expected(0, names[:RELAYED], 1),
        Expected(0, names[RELAYED:], 1),
    ]
    assert relay.counts[0] == 2
    saves.close()
    assert relay.told() == Closed(0)


def test_hosts_that_live_at_a_time_have_counts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TurnCounts, "places", 3)
    relay = Relay()
    first = relay.link.open(ends())
    numbers = [first.number]
    for _ in range(4):
        later = relay.link.open(ends())
        numbers.append(later.number)
        later.close()
    assert numbers == [0, 1, 2, 4, 5]


def test_what_was_passed_on_of_a_host_comes_in_parts_and_refusals_between_are_kept() -> None:
    relay = Relay()
    saves = relay.link.open(ends())
    one, two = (Relayed(name, 0, 3, 4, ended=False) for name in "ab")
    for said in (Refused(5, "odd"), Passed(7, [two]), Passed(0, [one], last=False), Passed(0, [two])):
        relay.say(said)
    saves.ask(trusted=False)
    assert [relay.told(), relay.told()] == [Opened(0), Lost(0, trusted=False)]
    relay.link.hear()
    assert relay.link.answers() == [(7, [two]), (0, [one, two])]
    assert relay.link.answers() == []
    assert relay.link.refused() == [Refused(5, "odd")]
    assert relay.link.refused() == []


def test_a_relay_that_answers_late_is_not_waited_for_and_is_given_up_if_it_never_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    relay = Relay()
    saves = relay.link.open(ends())
    saves.ask(trusted=True)
    relay.link.hear()
    assert relay.link.answers() == []
    assert [relay.told(), relay.told()] == [Opened(0), Lost(0)]
    relay.link.look()
    assert not relay.link.lost
    monkeypatch.setattr(relay_link, "_SILENT_S", 0.0)
    relay.say(Passed(0, []))
    relay.link.hear()
    relay.link.look()
    assert not relay.link.lost
    later = relay.link.open(ends())
    later.ask(trusted=True)
    relay.link.look()
    assert relay.link.lost
    assert [relay.told(), relay.told()] == [Opened(1), Lost(1)]
    # It learns that, and ends.
    assert receive_descriptors(relay.control)[0] == b""


def test_a_relay_that_has_ended_is_lost() -> None:
    relay = Relay()
    saves = relay.link.open(ends())
    assert not relay.link.lost
    relay.control.close()
    with pytest.raises(RelayLost, match="the process that passes on what blocks save has ended"):
        relay.link.hear()
    assert relay.link.lost
    # The worker hears of it from the connection.
    saves.expect("r", 0)
    saves.allow(1)
    given = ends()
    with pytest.raises(RelayLost):
        relay.link.open(given)
    given.close()
    saves.close()
    relay.link.close()
    relay.link.close()


def test_orders_wait_a_while_for_a_relay_that_has_left_much_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    relay = Relay()
    told: list[Any] = []
    reader = threading.Thread(target=lambda: told.extend(relay.told() for _ in range(5000)))
    reader.start()
    for number in range(5000):
        relay.link.tell(Closed(number))
    reader.join(30)
    assert told == [Closed(number) for number in range(5000)]
    monkeypatch.setattr(relay_link, "_TAKEN_S", 0.01)
    with pytest.raises(RelayLost):
        for number in range(1 << 20):
            relay.link.tell(Closed(number))
