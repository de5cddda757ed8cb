"""What a worker keeps of a host and of its traces."""

from __future__ import annotations

from typing import Any

from tracewire_engine.link.shared_rows import RowMemory
from tracewire_engine.protocol.block_host import Arrived, Reply, Wait
from tracewire_engine.worker.block_host.host import BlockHost, HostedRequest, HostedTrace


class Host:
    large = 0

    def __init__(self) -> None:
        self.given = RowMemory.create(1 << 16)
        self.sent: list[bytes] = []
        self.calls = self

    def send(self, message: bytes) -> None:
        self.sent.append(message)


def host(*, reads: bool = False) -> BlockHost:
    process: Any = Host()
    return BlockHost(process, ("", reads))


def add(one: BlockHost, name: str, reads: set[str] | None) -> HostedTrace:
    trace = HostedTrace(name, one, 1)
    assert one.add(trace)
    request = HostedRequest(trace, f"{name}-1", name, 0)
    one.take_request(request, Arrived(request.id, {}), None if reads is None else frozenset(reads))
    return trace


def test_the_model_waits_at_the_visit_that_a_block_asks_for() -> None:
    one = host()
    one.take(Reply(waits=[Wait("a", 0), Wait("b", 2)], observed=["c"]))
    assert {*one.waits, *one.observed} == {"a", "b", "c"}
    assert [one.passes("b") for _ in range(3)] == [False, False, True]
    assert one.passes("a")
    assert not one.passes("c")


def test_rows_are_sent_of_what_the_live_traces_read() -> None:
    one = host(reads=True)
    first = add(one, "first", {"a"})
    add(one, "second", {"a", "b"})
    assert one.reads == one.observed == {"a", "b"}
    one.drop(first)
    assert {*one.waits, *one.observed} == {"a", "b"}
    third = add(one, "third", {"c"})
    one.drop(third)
    assert {*one.waits, *one.observed} == {"a", "b"}
    assert list(one.traces) == ["second"]
    assert list(one.records) == [("second", 0)]


def test_one_block_that_may_write_makes_the_model_wait() -> None:
    one = host(reads=True)
    trace = add(one, "t", {"a"})
    one.take_request(HostedRequest(trace, "t-2", "u", 0), Arrived("t-2", {}), None)
    assert one.reads is None
    one.drop(trace)
    assert one.reads is None


def test_a_host_that_is_retired_takes_no_trace() -> None:
    one = host()
    trace = add(one, "t", None)
    assert not one.retire()
    one.drop(trace)
    assert one.retire()
    assert not one.retire()
    assert not one.add(HostedTrace("late", one, 1))


def test_a_trace_of_the_same_name_is_another_one() -> None:
    one = host()
    before, after = add(one, "t", None), add(one, "t", None)
    one.drop(before)
    assert one.traces == {"t": after}
    assert one.records["t", 0].trace is after


def test_a_host_owes_the_turns_that_it_has_not_taken() -> None:
    one = host()
    assert not one.owes(0.0)
    one.send([], waits=False)
    one.send([], waits=False)
    assert one.owes(0.0)
    assert not one.owes(60.0)
    one.took(1, 0)
    assert one.owes(0.0)
    # What a host claims beyond what it was sent counts for nothing.
    one.took(7, 1 << 20)
    assert one.owes(0.0)
    assert one.process.given.returned == 0
    one.took(2, 0)
    assert not one.owes(0.0)
