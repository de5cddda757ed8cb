"""What a host reports, passed on; and its trace's ends when the host is gone."""

from __future__ import annotations

import queue
import socket
from typing import Any

import msgspec
import pytest

from tracewire_bus.wire.messages import Failure
from tracewire_engine.link.host_channel import HostChannel
from tracewire_engine.link.shared_rows import RowMemory
from tracewire_engine.protocol.block_host import Arrived, Broken, Chunk, Reported
from tracewire_engine.protocol.messages import FinishRecord, StepRecord
from tracewire_engine.worker.block_host.hosted_trace import HostedRequest, HostedTrace
from tracewire_engine.worker.block_host.report_thread import ReportThread

NOTHING = msgspec.Raw(msgspec.msgpack.encode([]))


class Host:
    def __init__(self) -> None:
        calls, _ = self._other = socket.socketpair()
        reports, theirs = socket.socketpair()
        self.calls, self.reports, self.theirs = HostChannel(calls), HostChannel(reports), HostChannel(theirs)
        self.given = RowMemory.create(1 << 16)
        self.killed = self.closed = False

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        self.closed = True

    def says(self, report: Any) -> None:
        self.theirs.send(msgspec.msgpack.encode(report))


class Sent:
    """In place of the link and of the sender of large arrays."""

    def __init__(self) -> None:
        self.reports: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def send(self, *reports: Any) -> None:
        for report in reports:
            self.reports.put(report)

    def relay(self, lane: Any, message: Any, data: bytes = b"") -> None:
        self.reports.put(("relayed", message, data))

    def next(self) -> Any:
        return self.reports.get(timeout=30)


def watched(patience_s: float = 0.0) -> tuple[ReportThread, HostedTrace, Host, Sent]:
    host, sent = Host(), Sent()
    link: Any = sent
    thread = ReportThread(lambda: link, link, patience_s)
    anyhost: Any = host
    trace = HostedTrace("t", anyhost, None, 1)
    trace.add(Arrived("r-1", {}), HostedRequest("r-1", "r", 0))
    trace.shared_names.add("t")
    thread.watch(trace)
    return thread, trace, host, sent


def test_records_of_the_traces_own_requests_are_passed_on() -> None:
    thread, trace, host, sent = watched()
    steps = [StepRecord(name, 0, 0, NOTHING) for name in ("r", "foreign", "t")]
    host.says(Reported(steps, [FinishRecord("foreign", 0, NOTHING)]))
    report = sent.next()
    assert ([step.request for step in report.steps], report.finishes) == (["r", "t"], [])
    trace.complete = True
    thread.forget(trace)
    host.says(Reported([], [FinishRecord("r", 0, NOTHING)]))
    assert [finish.request for finish in sent.next().finishes] == ["r"]


def test_an_end_before_the_loss_of_the_host_is_reported_too() -> None:
    thread, trace, host, sent = watched()
    thread.finish(trace, "r-1")
    host.theirs.close()
    assert sent.next().steps[0].ended == "error"
    assert sent.next().finishes[0].error.type == "BlockHostLost"


def test_a_host_that_is_gone_ends_its_requests() -> None:
    thread, trace, host, sent = watched()
    host.says(Reported([StepRecord("r", 0, 4, NOTHING)]))
    host.says(Broken("it broke"))
    host.theirs.close()
    assert sent.next().steps[0].index == 4
    (ended,) = sent.next().steps
    assert (ended.index, ended.ended) == (5, "error")
    thread.finish(trace, "r-1")
    (finish,) = sent.next().finishes
    assert (finish.error.type, finish.steps, finish.tokens) == ("BlockHostLost", 2, 6)
    assert "it broke" in finish.error.message


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x93\xa8reported\x91\x95"])
def test_a_host_that_sends_no_report_ends_its_requests(garbage: bytes) -> None:
    _, _, host, sent = watched()
    host.theirs.send(garbage)
    assert sent.next().steps[0].ended == "error"
    assert host.killed


def test_a_host_that_takes_no_turn_ends_its_requests() -> None:
    _, trace, host, sent = watched(patience_s=0.01)
    trace.send([], waits=False)
    assert sent.next().steps[0].ended == "error"
    assert trace.failure is not None
    assert trace.failure.type == "BlockTimeout"
    assert host.killed


def test_large_arrays_and_all_that_follows_them_go_together() -> None:
    thread, trace, host, sent = watched()
    host.says(Chunk("r", "blob", 0, b"data"))
    host.says(Reported([StepRecord("r", 0, 0, NOTHING)]))
    assert sent.next()[2] == b"data"
    assert sent.next()[1].steps[0].request == "r"
    trace.failure = Failure(type="X", message="y")
    thread.lose(trace)
    assert sent.next()[1].steps[0].ended == "error"
