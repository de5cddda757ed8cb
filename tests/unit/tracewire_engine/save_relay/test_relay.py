"""What the save relay passes on of what hosts send, and what it does not."""

from __future__ import annotations

import os
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tracewire_engine.link.host_channel import ChannelClosed, HostChannel, receive_descriptors, send_descriptors
from tracewire_engine.link.message_memory import MessageMemory
from tracewire_engine.link.shared_rows import sealed_memory
from tracewire_engine.link.turn_counts import TurnCounts
from tracewire_engine.protocol.block_host import Saved
from tracewire_engine.protocol.messages import Report, StepRecord
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
from tracewire_engine.save_relay.relay import SaveRelay

NOTHING = msgspec.Raw(msgspec.msgpack.encode([]))


def step(request: str, index: int = 0, ended: str = "", deltas: msgspec.Raw = NOTHING) -> StepRecord:
    return StepRecord(request, 0, index, deltas, ended)


class Relay:
    """A relay on a thread, as its worker, its hosts and its adapter see it."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(30)
        self.counts = TurnCounts.create()
        self.sent: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self.connected: list[Settings] = []
        relay = SaveRelay(theirs, self._connect)

        def run() -> None:
            with theirs:
                relay.run()

        self.thread = threading.Thread(target=run)
        self.thread.start()
        self.tell(Settings("somewhere", 2), self.counts.descriptor)

    def _connect(self, settings: Settings) -> Any:
        self.connected.append(settings)
        return self

    def send(self, *reports: Report) -> None:
        for report in reports:
            self.sent.put(report)

    def tell(self, order: Order, *descriptors: int) -> None:
        send_descriptors(self.control, msgspec.msgpack.encode(order), list(descriptors))

    def said(self) -> Passed | Refused:
        message, _ = receive_descriptors(self.control)
        said: Passed | Refused = msgspec.msgpack.decode(message, type=Passed | Refused)
        return said

    def open(self, number: int, turns: int = 1000) -> HostChannel:
        """A host's end of its connection."""
        own, theirs = socket.socketpair()
        memory = sealed_memory(1 << 20)
        self.counts[number] = turns
        self.tell(Opened(number), theirs.fileno(), memory)
        theirs.close()
        return HostChannel(own, memory=MessageMemory(memory, 1 << 20))

    def next(self) -> list[tuple[str, int]]:
        return [(one.request, one.index) for one in self.sent.get(timeout=30).steps]


@pytest.fixture
def relay() -> Iterator[Relay]:
    found = Relay()
    yield found
    found.control.close()
    found.thread.join(30)
    assert not found.thread.is_alive()
    found.counts.close()


def says(host: HostChannel, *steps: StepRecord) -> None:
    host.send(msgspec.msgpack.encode(Saved(list(steps))))


def test_records_of_the_host_s_own_requests_are_passed_on_and_no_others(relay: Relay) -> None:
    host, other = relay.open(1), relay.open(2)
    relay.tell(Expected(1, [("a", 0)]))
    relay.tell(Expected(2, [("b", 0)]))
    says(host, step("b"), step("a"), StepRecord("a", 1, 0, NOTHING))
    assert relay.next() == [("a", 0)]
    says(other, step("b", 5))
    assert relay.next() == [("b", 5)]
    assert relay.connected == [Settings("somewhere", 2)]


def test_a_record_of_a_token_beyond_the_turns_of_its_request_is_refused(relay: Relay) -> None:
    """A host may have had many turns before, which are none of the request's."""
    host = relay.open(1)
    relay.counts[1] = 103
    relay.tell(Expected(1, [("a", 0)], 100))
    says(host, step("a", 0), step("a", 2))
    assert relay.next() == [("a", 0), ("a", 2)]
    says(host, step("a", 3))
    assert relay.said() == Refused(1, "a record of token 3 in 3 turns of its request")


def test_large_messages_come_through_the_memory(relay: Relay) -> None:
    host = relay.open(1)
    relay.tell(Expected(1, [("a", 0)]))
    deltas = msgspec.Raw(msgspec.msgpack.encode([["s", ["x"], b"x" * 200_000]]))
    says(host, step("a", deltas=deltas))
    assert bytes(relay.sent.get(timeout=30).steps[0].deltas) == bytes(deltas)


def test_what_was_passed_on_of_a_host_that_is_lost_is_counted_with_what_it_has_still_sent(relay: Relay) -> None:
    host = relay.open(1)
    relay.tell(Expected(1, [("a", 0), ("b", 0), ("over", 0)]))
    says(host, step("a", 3), step("over", 3), step("b", 1, ended="stop"))
    assert len(relay.next()) == 3
    relay.tell(Over(1, [("over", 0)]))
    says(host, step("a", 4))
    host.close()
    relay.tell(Lost(1))
    passed = relay.said()
    assert passed == Passed(1, [Relayed("a", 0, 4, 2, ended=False), Relayed("b", 0, 1, 1, ended=True)])
    assert relay.next() == [("a", 4)]


def test_what_an_untrusted_host_has_still_sent_is_not_passed_on(relay: Relay) -> None:
    host = relay.open(1)
    relay.tell(Expected(1, [("a", 0)]))
    host.send(b"no message")
    assert relay.said() == Refused(1, "Expected `array`, got `int`")
    says(host, step("a"))
    relay.tell(Over(1, [("other", 0)]))
    relay.tell(Lost(1, trusted=False))
    assert relay.said() == Passed(1, [Relayed("a", 0, -1, 0, ended=False)])
    assert relay.sent.empty()


@pytest.mark.parametrize(
    "odd",
    [
        step("a", -1),
        step("a", ended="oddly"),
        step("a", deltas=msgspec.Raw(b"\x05")),
        step("a", deltas=msgspec.Raw(b"\x91" * 5000 + b"\xc0")),
    ],
)
def test_a_host_that_sends_what_no_host_sends_is_not_read_any_more(relay: Relay, odd: StepRecord) -> None:
    host, other = relay.open(1), relay.open(2)
    relay.tell(Expected(1, [("a", 0)]))
    relay.tell(Expected(2, [("b", 0)]))
    says(host, odd)
    says(host, step("a"))
    refused = relay.said()
    assert isinstance(refused, Refused)
    assert refused.host == 1
    says(other, step("b"))
    assert relay.next() == [("b", 0)]


def test_bytes_that_are_no_message_are_refused_too(relay: Relay) -> None:
    own, theirs = socket.socketpair()
    memory = sealed_memory(1 << 20)
    relay.tell(Opened(1), theirs.fileno(), memory)
    theirs.close()
    os.close(memory)
    own.send(struct.pack("<I", 24 | 1 << 31) + struct.pack("<QQQ", 1 << 60, 1 << 17, 1 << 21))
    refused = relay.said()
    assert isinstance(refused, Refused)
    assert "a message lies outside the shared memory" in refused.why
    own.close()


def test_a_host_sends_as_many_records_as_its_requests_have_steps_at_most(relay: Relay) -> None:
    host = relay.open(1, turns=3)
    relay.tell(Expected(1, [("a", 0), ("b", 0)]))
    says(host, *(step(name, index) for index in range(3) for name in "ab"))
    assert len(relay.next()) == 6
    says(host, step("foreign", 3))
    refused = relay.said()
    assert isinstance(refused, Refused)
    assert refused.why == "7 records in 3 turns of at most 2 requests"


def test_an_order_or_a_host_that_fails_costs_that_host_alone(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    host, other = relay.open(1), relay.open(2)
    relay.tell(Expected(1, [("a", 0)]))
    relay.tell(Expected(2, [("b", 0)]))

    def fail(*_: Any) -> None:
        monkeypatch.undo()
        raise MemoryError("no memory")

    monkeypatch.setattr(SaveRelay, "_check", fail)
    says(host, step("a"))
    assert relay.said() == Refused(1, "no memory")
    relay.tell(Opened(3))
    refused = relay.said()
    assert isinstance(refused, Refused)
    assert (refused.host, "the save relay failed" in refused.why) == (3, True)
    says(other, step("b"))
    assert relay.next() == [("b", 0)]


def test_nothing_was_passed_on_of_a_host_that_is_not_known_any_more(relay: Relay) -> None:
    relay.open(1).close()
    relay.tell(Closed(1))
    relay.tell(Lost(1))
    assert relay.said() == Passed(1, [])


def test_a_host_sends_one_message_for_each_turn_at_most(relay: Relay) -> None:
    host = relay.open(1, turns=2)
    relay.tell(Expected(1, [("a", 0)]))
    for index in range(3):
        says(host, step("a", index))
    refused = relay.said()
    assert isinstance(refused, Refused)
    assert refused.why == "3 messages of saves, where 2 were allowed"


def test_a_host_that_is_closed_is_read_to_its_end_and_its_connection_is_closed(relay: Relay) -> None:
    # The worker's orders may come behind each other faster than the relay reads.
    for number, end in enumerate((Closed, Closed, Lost)):
        host = relay.open(number)
        relay.tell(Expected(number, [("a", 0)]))
        says(host, step("a", number))
        relay.tell(end(number))
        assert relay.next() == [("a", number)]
        with pytest.raises(ChannelClosed):
            host.receive(30)
        host.close()
    assert relay.said() == Passed(2, [Relayed("a", 0, 2, 1, ended=False)])


def test_many_records_are_counted_in_several_messages(relay: Relay) -> None:
    host = relay.open(1)
    names = [f"r{number}" for number in range(2 * RELAYED + 1)]
    for start in range(0, len(names), RELAYED):
        relay.tell(Expected(1, [(name, 0) for name in names[start : start + RELAYED]]))
    says(host, *(step(name, 7) for name in names))
    assert len(relay.next()) == len(names)
    relay.tell(Lost(1))
    parts = [relay.said() for _ in range(3)]
    assert [isinstance(one, Passed) and one.last for one in parts] == [False, False, True]
    found = [record.request for one in parts if isinstance(one, Passed) for record in one.records]
    assert found == names


def test_a_record_may_come_before_the_relay_has_read_that_it_is_expected(relay: Relay) -> None:
    """Both are there when the relay wakes: it takes what it is told first."""
    host = relay.open(1)
    for number in range(200):
        relay.tell(Expected(1, [(f"r{number}", 0)]))
        says(host, step(f"r{number}"))
    found: list[tuple[str, int]] = []
    while len(found) < 200:
        found += relay.next()
    assert found == [(f"r{number}", 0) for number in range(200)]


def test_what_the_relay_hears_while_it_reads_a_host_is_done_next(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    host = relay.open(1)
    relay.tell(Expected(1, [("a", 0)]))
    reads, told = threading.Event(), threading.Event()
    hear = SaveRelay._hear_expected

    def slowly(self: SaveRelay, *given: Any) -> None:
        reads.set()
        assert told.wait(30)
        hear(self, *given)

    monkeypatch.setattr(SaveRelay, "_hear_expected", slowly)
    says(host, step("foreign"), step("a"))
    assert reads.wait(30)
    relay.tell(Lost(1))
    told.set()
    assert relay.said() == Passed(1, [Relayed("a", 0, 0, 1, ended=False)])
    assert relay.next() == [("a", 0)]


def test_a_link_that_fails_costs_what_was_to_be_sent_alone(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    host = relay.open(1)
    relay.tell(Expected(1, [("a", 0)]))
    failed = threading.Event()

    def fail(*_: Report) -> None:
        failed.set()
        monkeypatch.undo()
        raise OSError("no link")

    monkeypatch.setattr(relay, "send", fail)
    says(host, step("a", 0))
    assert failed.wait(30)
    says(host, step("a", 1))
    assert relay.next() == [("a", 1)]


def test_the_relay_ends_with_its_worker() -> None:
    relay = Relay()
    host = relay.open(1)
    relay.control.close()
    relay.thread.join(30)
    assert not relay.thread.is_alive()
    # Its end of the host's connection is closed.
    with pytest.raises(ChannelClosed):
        host.receive(30)
    relay.counts.close()
