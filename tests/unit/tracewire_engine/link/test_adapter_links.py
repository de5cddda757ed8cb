"""A worker's links to several adapters: each gets what belongs to its own requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import msgspec
import pytest
import torch

from tests.support.ring import filled
from tracewire_engine.link import adapter_links, step_link
from tracewire_engine.link.adapter_links import AdapterLinks, link_to
from tracewire_engine.link.shared_ring import RingCopy
from tracewire_engine.link.step_link import LinkReceiver, LinkSender, encode_reports
from tracewire_engine.protocol.messages import (
    Applied,
    Batch,
    FinishRecord,
    Layout,
    LayoutEntry,
    Part,
    Read,
    Report,
    StepRecord,
)
from tracewire_engine.worker.host_copy import PinnedCopy

NONE = msgspec.Raw(msgspec.msgpack.encode([]))


@contextmanager
def adapters(count: int) -> Iterator[tuple[LinkSender, list[LinkReceiver]]]:
    """A worker's link, and the receivers of all adapters."""
    with ExitStack() as held:
        first = held.enter_context(LinkReceiver())
        others = [LinkReceiver(beside=first.address, adapter=number) for number in range(1, count)]
        yield link_to(first.address, count), [first, *map(held.enter_context, others)]


async def next_reports(receiver: LinkReceiver, count: int = 1) -> list[Report]:
    """At least this many reports: those sent one after another may arrive one by one."""
    found: list[Report] = []
    while len(found) < count:
        await receiver.arrived()
        found += receiver.ready()
    return found


async def next_bytes(receiver: LinkReceiver) -> list[bytes]:
    """The bytes of the next reports. They are valid only until the next report is taken."""
    await receiver.arrived()
    return [bytes(report.batch.data) for report in receiver.ready() if report.batch is not None]


def layout(number: int, *requests: str) -> Layout:
    reads = [Read("read", [Part("", "u1", (1,), 1, 0, 1)])]
    return Layout(number, [reads], [LayoutEntry(name, 0, 0, [(0, row, 1)]) for row, name in enumerate(requests)])


def send(link: LinkSender, report: Report, tensor: torch.Tensor) -> bool:
    """As the worker does; whether the bytes went by shared memory."""
    assert report.batch is not None
    copy = link.put(tensor, report) or PinnedCopy(tensor)
    copy.fill(report.batch)
    link.send(report)
    copy.release()
    return isinstance(copy, RingCopy)


def test_one_adapter_has_the_plain_link() -> None:
    with LinkReceiver() as receiver:
        assert type(link_to(receiver.address, 1)) is LinkSender
        assert type(link_to(receiver.address, 2)) is AdapterLinks


async def test_each_adapter_gets_its_own_records_in_order() -> None:
    with adapters(3) as (link, receivers):
        for step in range(5):
            report = Report(float(step))
            report.steps = [StepRecord(name, 0, step, NONE) for name in ("t0-ab", "a1t0-cd", "a1t1-ef")]
            if step == 4:
                report.finishes = [FinishRecord("a2t7-aa", 0, NONE), FinishRecord("t0-ab", 0, NONE)]
                report.applied = [Applied("a1t3", 2)]
            link.send(report)
        found = [await next_reports(receiver, count) for receiver, count in zip(receivers, (5, 5, 1), strict=True)]
        steps = [[(report.time, [one.request for one in report.steps]) for report in of] for of in found]
        assert steps[0] == [(float(step), ["t0-ab"]) for step in range(5)]
        assert steps[1] == [(float(step), ["a1t0-cd", "a1t1-ef"]) for step in range(5)]
        # The third adapter has no request but in the last step, and is sent nothing before.
        assert steps[2] == [(4.0, [])]
        assert [[one.request for one in of[-1].finishes] for of in found] == [["t0-ab"], [], ["a2t7-aa"]]
        assert [[one.run for one in of[-1].applied] for of in found] == [[], ["a1t3"], []]


async def test_requests_of_no_adapter_are_those_of_the_first() -> None:
    with adapters(2) as (link, receivers):
        link.send(Report(1.0, [StepRecord("o5", 0, 0, NONE), StepRecord("a7t0", 0, 0, NONE)]))
        (report,) = await next_reports(receivers[0])
        assert [one.request for one in report.steps] == ["o5", "a7t0"]


async def test_bytes_go_to_the_adapters_of_the_layouts_requests() -> None:
    with adapters(3) as (link, receivers):
        # The first goes in messages: no adapter has the memory open yet.
        assert not send(link, Report(0.0, layout=layout(1, "t0", "a1t0"), batch=Batch(1, 0)), filled(50_000, 0))
        for receiver in receivers:
            (report,) = await next_reports(receiver)
            assert report.ring
        for step in range(1, 300):
            # Twelve megabytes in all are more than the memory holds if an adapter's room were not given back.
            assert send(link, Report(float(step), batch=Batch(1, step)), filled(500_000, step))
            for receiver in receivers[:2]:
                assert await next_bytes(receiver) == [filled(500_000, step).numpy().tobytes()]
        assert list(receivers[2].ready()) == []
        # From the next layout on, the third adapter reads, and the first does not.
        assert send(link, Report(300.0, layout=layout(2, "a2t0"), batch=Batch(2, 0)), filled(50_000, 300))
        assert await next_bytes(receivers[2]) == [filled(50_000, 300).numpy().tobytes()]
        assert [list(receiver.ready()) for receiver in receivers[:2]] == [[], []]


async def test_each_adapter_gets_its_own_entries_of_a_layout() -> None:
    with adapters(2) as (link, receivers):
        send(link, Report(0.0, layout=layout(1, "t0", "a1t0", "t1"), batch=Batch(1, 0)), filled(10, 0))
        found = [(await next_reports(receiver))[0].layout for receiver in receivers]
        assert [[entry.request for entry in one.entries] for one in found if one is not None] == [
            ["t0", "t1"],
            ["a1t0"],
        ]


@pytest.mark.parametrize("late", [0, 1])
async def test_an_adapter_that_is_behind_keeps_its_bytes(late: int) -> None:
    with adapters(2) as (link, receivers):
        send(link, Report(0.0, layout=layout(1, "t0", "a1t0"), batch=Batch(1, 0)), filled(50_000, 0))
        for receiver in receivers:
            await next_reports(receiver)
        shared = 0
        for step in range(1, 200):
            shared += send(link, Report(float(step), batch=Batch(1, step)), filled(1_000_000, step))
            await next_reports(receivers[1 - late])
        # The memory holds some sixty of these, and the rest went in messages.
        assert 50 < shared < 70
        step = 0
        while step < 199:
            await receivers[late].arrived()
            for report in receivers[late].ready():
                step += 1
                assert report.batch is not None
                assert bytes(report.batch.data[:1000]) == filled(1_000_000, step)[:1000].numpy().tobytes()


async def test_reports_of_reads_alone_are_encoded_once_for_all_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []

    def counted(reports: Sequence[Report], buffer: bytearray) -> None:
        encoded.append(len(reports))
        encode_reports(reports, buffer)

    for module in (adapter_links, step_link):
        monkeypatch.setattr(module, "encode_reports", counted)
    with adapters(3) as (link, receivers):
        for number, requests in ((1, ("t0", "a1t0", "a2t0")), (2, ("a1t0", "a2t0"))):
            link.put(filled(50, number), Report(layout=layout(number, *requests)))
        link.send(Report(1.0, batch=Batch(1, 0)), Report(2.0, batch=Batch(1, 1)))
        assert encoded == [2]
        # Of other adapters each, or with more than reads, as every other report.
        link.send(Report(3.0, batch=Batch(1, 2)), Report(4.0, batch=Batch(2, 0)))
        link.send(Report(5.0, batch=Batch(2, 1)), Report(6.0, [StepRecord("t0", 0, 0, NONE)], batch=Batch(2, 2)))
        link.send(Report(7.0, batch=Batch(2, 3)))
        assert encoded == [2, 1, 2, 2, 1, 2, 2, 1]
        times = [
            [report.time for report in await next_reports(receiver, count)]
            for receiver, count in zip(receivers, (4, 7, 7), strict=True)
        ]
    assert times == [[1.0, 2.0, 3.0, 6.0], [float(time) for time in range(1, 8)], [float(time) for time in range(1, 8)]]
