"""Reports of hosts, gathered or behind large arrays."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tracewire_engine.link.blob_receiver import BlobChunk
from tracewire_engine.protocol.block_host import Arrived, Chunk
from tracewire_engine.protocol.messages import FinishRecord, Report, StepRecord
from tracewire_engine.worker.block_host import gathered_reports
from tracewire_engine.worker.block_host.gathered_reports import GatheredReports
from tracewire_engine.worker.block_host.host import BlockHost, HostedRequest, HostedTrace
from tracewire_engine.worker.block_host.passed_arrays import PassedArrays
from tracewire_engine.worker.block_host.reading import Account

NOTHING = msgspec.Raw(msgspec.msgpack.encode([]))


class Adapter:
    """Takes what is sent, and what is relayed behind large arrays."""

    def __init__(self) -> None:
        self.came: list[Any] = []

    def send(self, *reports: Report) -> None:
        self.came += reports

    def relay(self, lane: tuple[str, int], message: BlobChunk | Report, data: Any) -> None:
        self.came.append((lane[0], message, data))


def host_of(*traces: str) -> BlockHost:
    process: Any = type("Process", (), {"large": 0})()
    host = BlockHost(process, ("", True))
    for name in traces:
        trace = HostedTrace(name, host, 1)
        assert host.add(trace)
        host.take_request(HostedRequest(trace, f"{name}-1", name, 0), Arrived(f"{name}-1", {}), Account())
    return host


def step(name: str) -> Report:
    return Report(steps=[StepRecord(name, 0, 0, NOTHING)])


def gathered(*hosts: BlockHost) -> tuple[GatheredReports, Adapter, list[Any]]:
    adapter: Any = Adapter()
    ended: list[Any] = []
    found = GatheredReports(lambda: adapter, adapter, lambda: hosts, lambda *why: ended.append(why))
    return found, adapter, ended


def test_reports_are_sent_together() -> None:
    host = host_of("a", "b")
    found, adapter, _ = gathered(host)
    found.send()
    assert (len(found), adapter.came) == (0, [])
    reports = [step("a"), step("b")]
    for report in reports:
        found.add(host, report)
    assert len(found) == 2
    found.send()
    assert (len(found), adapter.came) == (0, reports)


def test_a_trace_s_reports_follow_its_large_arrays_until_it_is_forgotten() -> None:
    host = host_of("a", "b")
    found, adapter, _ = gathered(host)
    found.add(host, step("a"))
    found.add_chunk(host, Chunk("a", "0" * 16, 0, b"data"))
    both = Report(steps=[*step("a").steps, *step("b").steps], finishes=[FinishRecord("a", 0, NOTHING)])
    found.add(host, both)
    found.send()
    chunk, before, behind, other = adapter.came
    assert (chunk[0], chunk[1], chunk[2]()) == ("a", BlobChunk("a", "0" * 16, 0), b"data")
    assert before.steps[0].request == "a"
    assert (behind[0], len(behind[1].steps), len(behind[1].finishes)) == ("a", 1, 1)
    assert [one.request for one in other.steps] == ["b"]
    found.forget(host.traces["a"])
    found.add(host, step("a"))
    assert len(found) == 1


def test_the_host_of_which_the_most_waits_is_ended_if_too_much_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered_reports, "PassedArrays", lambda: PassedArrays(1 << 20, 5000, 1))
    host, other = host_of("a"), host_of("b")
    found, adapter, ended = gathered(host, other)
    for one in (host, other):
        found.watch(one)
        assert one.allowed() > 0
    found.add_chunk(host, Chunk("a", "0" * 16, 0, b"x" * 3000))
    assert ended == []
    found.add_chunk(other, Chunk("b", "1" * 16, 0, b"x" * 100))
    ((most, waiting),) = ended
    assert most is host
    assert waiting > 3000
    # Its array is not sent any more.
    assert adapter.came[0][2]() is None
