"""What a worker keeps of a host and of its traces."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import torch

from tracewire_engine.link.shared_rows import RowMemory
from tracewire_engine.protocol.block_host import (
    Arrived,
    Began,
    Ended,
    Event,
    Finished,
    Generated,
    Reached,
    Repeated,
    Reply,
    Steered,
    Turn,
    Wait,
)
from tracewire_engine.worker.block_host.host import BlockHost, HostedRequest, HostedTrace
from tracewire_engine.worker.block_host.reading import Account
from tracewire_engine.worker.block_host.rows import StepRows
from tracewire_engine.worker.block_host.staged_step import StagedStep, StageLayout


class Host:
    large = 0

    def __init__(self) -> None:
        self.given = RowMemory.create(1 << 16)
        self.sent: list[bytes] = []
        self.calls = self

    unsent = False

    def send(self, message: bytes) -> None:
        self.sent.append(message)


def host(*, reads: bool = False) -> BlockHost:
    process: Any = Host()
    return BlockHost(process, ("", reads))


def add(one: BlockHost, name: str, reads: set[str] | None, *, keeps: bool = False) -> HostedTrace:
    trace = HostedTrace(name, one, 1)
    assert one.add(trace)
    request = HostedRequest(trace, f"{name}-1", name, 0)
    account = Account(None if reads is None else frozenset(reads), computes=True, keeps=keeps)
    one.take_request(request, Arrived(request.id, {}), account)
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
    one.take_request(HostedRequest(trace, "t-2", "u", 0), Arrived("t-2", {}), Account())
    assert one.reads is None
    one.drop(trace)
    assert one.reads is None


def test_a_trace_keeps_what_it_has_saved_if_no_block_of_its_host_may_write() -> None:
    one = host(reads=True)
    first, second = add(one, "first", {"a"}, keeps=True), add(one, "second", {"a"})
    assert [first.keeps, second.keeps] == [True, False]
    one.take_request(HostedRequest(second, "second-2", "u", 0), Arrived("second-2", {}), Account())
    assert [first.keeps, second.keeps] == [False, False]


def test_what_a_block_may_have_done_in_a_host_counts_when_its_trace_is_over() -> None:
    one = host()
    trace = add(one, "t", None)
    assert one.account.computes
    one.take_request(HostedRequest(trace, "t-2", "u", 0), Arrived("t-2", {}), Account())
    one.drop(trace)
    add(one, "later", None)
    assert not one.account.computes


def test_a_host_may_report_each_end_by_itself() -> None:
    one = host(reads=True)
    for event in (Finished("t-1"), Finished("t-2"), Generated(b"")):
        one.tell(event)
    assert one.untrusted.ends == 2


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


def test_a_trace_in_the_place_of_another_one_counts_once() -> None:
    one = host(reads=True)
    former = add(one, "t", {"a"})
    second = add(one, "t", {"b"})
    one.drop(former)
    assert one.reads == one.observed == {"b"}
    assert (one.accounts.traces, one.accounts.reads) == (1, 1)
    one.drop(second)
    assert one.accounts.traces == one.accounts.reads == 0
    assert one.reads == frozenset()


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


class Steps:
    """Steps in which a host reads one value."""

    def __init__(self) -> None:
        self.host = host(reads=True)
        self.index = 0
        self.rows = StepRows([(0, 1), (1, 1)], [0, 1], 2, 2)
        self.layout = StageLayout({self.host: self.rows})

    def begin(self, *names: str) -> None:
        self.host.begin([(name, 1, self.index) for name in names or ("a", "b")], self.rows)
        self.index += 1

    def read(self, passed: array[int], width: int = 2) -> None:
        step = StagedStep(self.layout, pinned=False)
        step.reach("here", torch.zeros(2, width), [self.host], 2, by_request=False, rows_only=False)
        step.compare()
        share = step.share_of(self.host)
        for readings in share.parts():
            self.host.read(share, readings, passed)

    def run(self, *passed: int, width: int = 2) -> None:
        """Run a step in which the model passes these locations."""
        self.begin()
        self.read(array("H", passed), width)
        self.host.end(array("H", passed))

    def told(self) -> list[Event]:
        """The events that the host has been told since the last call."""
        self.host.send([], waits=False)
        process: Any = self.host.process
        messages, process.sent = process.sent, []
        return [event for message in messages for event in msgspec.msgpack.decode(message, type=Turn).events]

    def kinds(self) -> list[type]:
        return [type(event) for event in self.told()]


WHOLE = [Began, Reached, Ended]


def test_a_step_like_the_last_one_is_told_as_its_first_byte() -> None:
    steps = Steps()
    steps.run(0, 1, 2, 3)
    assert steps.kinds() == WHOLE
    for _ in range(3):
        steps.run(0, 1, 2, 3)
    again = steps.told()
    assert [type(event) for event in again] == [Repeated] * 3
    assert len({event.start for event in again if isinstance(event, Repeated)}) == 3


def test_a_step_that_differs_in_anything_is_told_whole() -> None:
    steps = Steps()
    steps.run(0, 1, 2, 3)
    for passed, width in (((0, 1, 2), 2), ((4, 1, 2), 2), ((4, 1, 2), 3), ((4, 1, 2, 0), 3)):
        steps.told()
        steps.run(*passed, width=width)
        assert steps.kinds() == WHOLE
        steps.run(*passed, width=width)
        assert steps.kinds() == [Repeated]
    # Another token than the next one.
    steps.index += 1
    steps.run(*passed, width=width)
    assert steps.kinds() == WHOLE
    # Another request in the same place.
    steps.begin("a", "c")
    steps.read(array("H", passed), width)
    steps.host.end(array("H", passed))
    (began, _, _) = steps.told()
    assert began == Began([], [("a", 1, steps.index - 1), ("c", 1, steps.index - 1)])


def test_a_step_with_news_is_told_whole() -> None:
    steps = Steps()
    steps.run(0, 1, 2)
    steps.told()
    add(steps.host, "new", {"here"})
    steps.run(0, 1, 2)
    assert steps.kinds() == WHOLE
    # Live parameters change before a step, and within one.
    steps.host.tell(Steered(b""))
    steps.run(0, 1, 2)
    assert steps.kinds() == [Steered, Repeated]
    steps.begin()
    steps.host.tell(Steered(b""))
    steps.read(array("H", (0, 1, 2)))
    steps.host.end(array("H", (0, 1, 2)))
    assert steps.kinds() == [Began, Steered, Reached, Ended]


def test_a_step_that_is_sent_before_it_ends_is_told_in_pieces() -> None:
    steps = Steps()
    steps.run(0, 1, 2)
    steps.told()
    steps.begin()
    steps.read(array("H", (0, 1, 2)))
    assert steps.kinds() == [Began, Reached]
    steps.read(array("H", (0, 1, 2)))
    steps.host.end(array("H", (0, 1, 2)))
    assert steps.kinds() == [Reached, Ended]
    # The host read two values in that step.
    steps.run(0, 1, 2)
    assert steps.kinds() == WHOLE
    steps.run(0, 1, 2)
    assert steps.kinds() == [Repeated]


def test_a_step_that_reads_twice_is_told_whole() -> None:
    steps = Steps()
    for _ in range(2):
        steps.run(0, 1, 2)
    steps.told()
    steps.begin()
    for _ in range(2):
        steps.read(array("H", (0, 1, 2)))
    steps.host.end(array("H", (0, 1, 2)))
    assert steps.kinds() == [Began, Reached, Reached, Ended]
