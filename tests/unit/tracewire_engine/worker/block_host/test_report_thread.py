"""What a host reports, passed on; and its trace's ends when the host is gone."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from functools import partial
from typing import Any

import msgspec
import pytest

from tests.support.hosted_model import relay_to
from tracewire_bus.store.blobs import CHUNK_BYTES
from tracewire_bus.wire.messages import Failure
from tracewire_engine.link.blob_receiver import BlobChunk
from tracewire_engine.link.host_channel import ChannelClosed, HostChannel
from tracewire_engine.link.shared_rows import RowMemory, sealed_memory
from tracewire_engine.protocol.block_host import LARGE_OF_HOST, Arrived, Broken, Chunk, Generated, Reported, Saved, Turn
from tracewire_engine.protocol.messages import FinishRecord, StepRecord
from tracewire_engine.protocol.save_relay import Refused, Relayed
from tracewire_engine.worker.block_host import ended_hosts, gathered_reports, report_thread
from tracewire_engine.worker.block_host.host import BlockHost, HostedRequest, HostedTrace, LateTurn
from tracewire_engine.worker.block_host.passed_arrays import PassedArrays
from tracewire_engine.worker.block_host.reading import Account
from tracewire_engine.worker.block_host.relay_link import SaveEnds
from tracewire_engine.worker.block_host.report_thread import ReportThread

NOTHING = msgspec.Raw(msgspec.msgpack.encode([]))


class Host:
    def __init__(self) -> None:
        calls, _ = self._other = socket.socketpair()
        reports, theirs = socket.socketpair()
        self.calls, self.reports, self.theirs = HostChannel(calls), HostChannel(reports), HostChannel(theirs)
        self.given = RowMemory.create(1 << 16)
        self.killed = self.closed = False
        self.gone = threading.Event()
        self.large = 0

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        self.closed = True
        self.gone.set()

    def places(self) -> str:
        return ""

    def says(self, report: Any) -> None:
        self.theirs.send(msgspec.msgpack.encode(report))

    def take_saves(self) -> SaveEnds:
        saves, theirs = socket.socketpair()
        self.saver = HostChannel(theirs)
        return SaveEnds(saves.detach(), sealed_memory(1 << 16))

    def saves(self, *steps: StepRecord) -> None:
        self.saver.send(msgspec.msgpack.encode(Saved(list(steps))))


class Sent:
    """In place of the link and of the sender of large arrays."""

    def __init__(self) -> None:
        self.reports: queue.SimpleQueue[Any] = queue.SimpleQueue()
        #: What has not been sent, if the bus is slow.
        self.slow, self.held = False, list[Any]()

    def send(self, *reports: Any) -> None:
        for report in reports:
            self.reports.put(report)

    def relay(self, lane: Any, message: Any, data: Any) -> None:
        if self.slow:
            self.held.append((message, data))
            self.reports.put(("held", message))
        else:
            self.reports.put(("relayed", message, data()))

    def next(self) -> Any:
        return self.reports.get(timeout=30)


def watched(patience_s: float = 0.0, *, relayed: bool = False) -> tuple[ReportThread, BlockHost, Host, Sent]:
    host, sent = Host(), Sent()
    link: Any = sent
    thread = ReportThread(lambda: link, link, patience_s, (lambda: relay_to(link)) if relayed else None)
    anyhost: Any = host
    known = BlockHost(anyhost, None)
    # Each allows a report.
    known.turns = known.taken = 9
    if relayed:
        thread.watch(known)
    add(known, "t", "r")
    known.share(known.traces["t"], "t")
    if known.saves is not None:
        known.saves.allow(9)
    else:
        thread.watch(known)
    return thread, known, host, sent


def add(host: BlockHost, trace: str, request: str) -> None:
    made = HostedTrace(trace, host, 1)
    assert host.add(made)
    host.take_request(HostedRequest(made, f"{request}-1", request, 0), Arrived(f"{request}-1", {}), Account())


def waits(event: threading.Event) -> None:
    assert event.wait(30)


def test_records_of_the_traces_own_requests_are_passed_on() -> None:
    thread, known, host, sent = watched()
    steps = [StepRecord(name, 0, 0, NOTHING) for name in ("r", "foreign", "t")]
    host.says(Reported(steps, [FinishRecord("foreign", 0, NOTHING)]))
    report = sent.next()
    assert ([step.request for step in report.steps], report.finishes) == (["r", "t"], [])
    trace = known.traces["t"]
    trace.complete = True
    thread.forget(trace)
    host.says(Reported([], [FinishRecord("r", 0, NOTHING)]))
    assert [finish.request for finish in sent.next().finishes] == ["r"]


def test_an_end_before_the_loss_of_the_host_is_reported_too() -> None:
    thread, known, host, sent = watched()
    thread.finish(known.records["r", 0])
    host.theirs.close()
    assert sent.next().steps[0].ended == "error"
    assert sent.next().finishes[0].error.type == "BlockHostLost"


def test_a_host_that_is_gone_ends_its_requests() -> None:
    thread, known, host, sent = watched()
    host.says(Reported([StepRecord("r", 0, 4, NOTHING)]))
    host.says(Broken("it broke"))
    host.theirs.close()
    assert sent.next().steps[0].index == 4
    (ended,) = sent.next().steps
    assert (ended.index, ended.ended) == (5, "error")
    thread.finish(known.records["r", 0])
    (finish,) = sent.next().finishes
    assert (finish.error.type, finish.steps, finish.tokens) == ("BlockHostLost", 2, 6)
    assert not finish.restart
    assert "it broke" in finish.error.message


def test_a_host_that_says_it_is_broken_is_ended_whether_it_goes_or_not() -> None:
    thread, known, host, sent = watched()
    host.says(Broken("it broke"))
    (ended,) = sent.next().steps
    assert (ended.index, ended.ended) == (0, "error")
    assert host.killed
    thread.finish(known.records["r", 0])
    assert "it broke" in sent.next().finishes[0].error.message
    known.traces["t"].complete = True
    thread.forget(known.traces["t"])
    assert host.gone.wait(30)


def test_a_host_that_never_stops_reporting_is_ended_first(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, host, sent = watched()
    over = threading.Event()

    def kill() -> None:
        over.set()
        flood.join(30)
        host.theirs.close()

    def report() -> None:
        while not over.is_set():
            with contextlib.suppress(ChannelClosed):
                host.says(Reported(turns=9))

    monkeypatch.setattr(host, "kill", kill)
    flood = threading.Thread(target=report)
    flood.start()
    assert sent.next().steps[0].ended == "error"
    assert over.is_set()


DEEP = b"\x91" * 100_000 + b"\xc0"


#: Texts that are none, as the name of a save and as that of a request.
NO_NAME = msgspec.msgpack.encode(Reported([StepRecord("r", 0, 0, msgspec.Raw(b"\x91\x93\xa1a\x91\xa1\xff\x91\x01"))]))
NO_TEXT = msgspec.msgpack.encode(Reported([StepRecord("named", 0, 0, NOTHING)])).replace(b"named", b"n\xffmed")


@pytest.mark.parametrize(
    "garbage", [b"", b"\xc1", b"\x93\xa8reported\x91\x95", b"\x93\xa8reported" + DEEP, NO_NAME, NO_TEXT]
)
def test_a_host_that_sends_no_report_ends_its_requests(garbage: bytes) -> None:
    _, _, host, sent = watched()
    host.theirs.send(garbage)
    assert sent.next().steps[0].ended == "error"
    assert host.killed


@pytest.mark.parametrize("more", ["has come with it", "comes as it is ended"])
def test_a_host_that_reports_what_no_host_reports_is_ended(monkeypatch: pytest.MonkeyPatch, more: str) -> None:
    thread, known, host, sent = watched()
    killed, reads = threading.Event(), threading.Event()

    def kill() -> None:
        if more == "comes as it is ended":
            host.says(Reported([StepRecord("r", 0, 5, NOTHING)]))
        killed.set()

    monkeypatch.setattr(host, "kill", kill)
    thread.do(lambda: waits(reads))
    host.says(Reported([StepRecord("r", 0, 4, msgspec.Raw(b"\x91\xc0"))]))
    if more == "has come with it":
        host.says(Reported([StepRecord("r", 0, 5, NOTHING)]))
    reads.set()
    (ended,) = sent.next().steps
    assert (ended.index, ended.ended) == (0, "error")
    assert killed.is_set()
    thread.finish(known.records["r", 0])
    (finish,) = sent.next().finishes
    assert finish.error.type == "BlockHostLost"
    assert "what it reported is no report" in finish.error.message


def test_values_that_traces_share_have_one_choice() -> None:
    _, _, host, sent = watched()
    host.says(Reported([StepRecord("t", 7, 0, NOTHING)], [FinishRecord("t", 7, NOTHING)]))
    host.says(Reported([StepRecord("t", 0, 0, NOTHING)]))
    assert [(step.request, step.choice) for step in sent.next().steps] == [("t", 0)]


def test_a_host_that_withholds_the_end_of_a_request_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_thread, "_ENDING_S", 0.0)
    thread, known, host, sent = watched(patience_s=9.0)
    thread.finish(known.records["r", 0])
    # The thread looks before it waits.
    thread.do(lambda: None)
    assert sent.next().steps[0].ended == "error"
    assert "has not reported the end" in sent.next().finishes[0].error.message
    assert host.killed


def test_a_host_that_takes_no_turn_ends_its_requests() -> None:
    _, known, host, sent = watched(patience_s=0.01)
    known.send([], waits=False)
    assert sent.next().steps[0].ended == "error"
    assert known.failure is not None
    assert known.failure.type == "BlockTimeout"
    assert host.killed


def test_what_several_hosts_report_of_a_step_leaves_as_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    # The thread waits for the second report however long that takes.
    monkeypatch.setattr(report_thread, "_GATHERED", 1_000_000)
    host, second, sent = Host(), Host(), Sent()
    messages: list[int] = []
    link: Any = sent

    class Counting(Sent):
        def send(self, *reports: Any) -> None:
            messages.append(len(reports))
            sent.send(*reports)

    counting: Any = Counting()
    thread = ReportThread(lambda: counting, link)
    for one, name in ((host, "r"), (second, "s")):
        process: Any = one
        known = BlockHost(process, None)
        known.turns, known.taken = 1, 0
        add(known, name, name)
        thread.watch(known)
    both = threading.Event()
    thread.do(both.set)
    waits(both)
    for one, name in ((host, "r"), (second, "s")):
        one.says(Reported([StepRecord(name, 0, 0, NOTHING)], turns=1))
    assert {sent.next().steps[0].request for _ in range(2)} == {"r", "s"}
    assert messages == [2]


def test_what_the_relay_has_passed_on_counts_when_a_host_is_lost() -> None:
    thread, known, host, sent = watched(relayed=True)
    host.saves(StepRecord("r", 0, 4, NOTHING), StepRecord("foreign", 0, 0, NOTHING), StepRecord("t", 0, 0, NOTHING))
    assert [(step.request, step.index) for step in sent.next().steps] == [("r", 4), ("t", 0)]
    host.saves(StepRecord("r", 0, 5, NOTHING))
    host.saver.close()
    host.theirs.close()
    assert [step.index for step in sent.next().steps] == [5]
    (ended,) = sent.next().steps
    assert (ended.request, ended.index, ended.ended) == ("r", 6, "error")
    thread.finish(known.records["r", 0])
    (finish,) = sent.next().finishes
    assert (finish.error.type, finish.steps, finish.tokens) == ("BlockHostLost", 3, 7)
    thread.close()


def test_a_request_that_its_block_has_ended_is_not_ended_again_with_its_host() -> None:
    thread, known, host, sent = watched(relayed=True)
    add(known, "u", "s")
    assert known.saves is not None
    known.saves.allow(9)
    host.saves(StepRecord("r", 0, 4, NOTHING, "stop"))
    assert sent.next().steps
    host.theirs.close()
    assert [(step.request, step.ended) for step in sent.next().steps] == [("s", "error")]
    thread.close()


def test_saves_that_no_host_sends_end_the_host() -> None:
    thread, known, host, sent = watched(relayed=True)
    host.saver.send(msgspec.msgpack.encode(Saved([StepRecord("r", 0, -1, NOTHING)])))
    (ended,) = sent.next().steps
    assert (ended.index, ended.ended) == (0, "error")
    assert host.killed
    assert known.failure is not None
    assert "what it saved is no save: a record of token -1" in known.failure.message
    thread.close()


def test_the_traces_of_all_hosts_run_again_when_the_relay_is_lost() -> None:
    thread, known, host, sent = watched(relayed=True)
    known.begin([("r-1", 1, 7)], None)
    host.saves(StepRecord("r", 0, 6, NOTHING))
    assert sent.next().steps
    assert known.saves is not None
    lost = known.saves.link
    lost._give_up()
    (ended,) = sent.next().steps
    assert (ended.request, ended.index, ended.ended) == ("r", 8, "error")
    assert host.killed
    thread.finish(known.records["r", 0])
    (finish,) = sent.next().finishes
    assert (finish.error.type, finish.restart) == ("BlockHostLost", True)
    assert "the process that passes on what blocks save has ended" in finish.error.message
    # Later hosts have another relay.
    other: Any = Host()
    later = BlockHost(other, None)
    thread.watch(later)
    assert later.saves is not None
    assert later.saves.link is not lost
    thread.close()


def test_what_the_relay_says_of_other_hosts_meanwhile_is_heard() -> None:
    thread, known, host, sent = watched(relayed=True)
    other: Any = Host()
    second = BlockHost(other, None)
    thread.watch(second)
    add(second, "u", "s")
    assert known.saves is not None
    assert second.saves is not None
    second.saves.allow(9)
    refused = Refused(second.saves.number, "odd")
    ask, link = known.saves.ask, known.saves.link

    def asked(*, trusted: bool) -> None:
        # As if it came before the relay's answer.
        link._refused.append(refused)
        ask(trusted=trusted)

    known.saves.ask = asked  # type: ignore[method-assign]
    host.theirs.close()
    assert {step.request for _ in range(2) for step in sent.next().steps} == {"r", "s"}
    assert second.failure is not None
    assert "what it saved is no save: odd" in second.failure.message
    thread.close()


def test_a_host_that_comes_as_its_relay_is_lost_is_not_to_blame() -> None:
    thread, known, _, sent = watched(relayed=True)
    assert known.saves is not None
    known.saves.link._give_up()
    assert sent.next().steps
    late: Any = Host()
    after = BlockHost(late, None)
    after.saves = known.saves
    add(after, "u", "s")
    thread.do(lambda: thread._watch(after))
    assert sent.next().steps
    assert (after.lost, after.failed_together) == (True, True)
    thread.close()


def test_a_relay_that_answers_late_leaves_the_ends_to_what_hosts_were_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for it, and what it says later makes no difference."""
    thread, known, host, sent = watched(relayed=True)
    known.begin([("r-1", 1, 7)], None)
    assert known.saves is not None
    link, number = known.saves.link, known.saves.number
    monkeypatch.setattr(known.saves, "ask", lambda *, trusted: None)
    host.theirs.close()
    thread.finish(known.records["r", 0])
    while known not in thread._ended:
        thread.wait_for_reports(0.01)
    assert not known.records["r", 0].over
    monkeypatch.setattr(ended_hosts, "_ANSWER_S", -1.0)
    assert [(step.index, step.ended) for step in sent.next().steps] == [(8, "error")]
    assert sent.next().finishes[0].tokens == 9
    link._answers.append((number, [Relayed("r", 0, 20, 21, ended=False)]))
    assert thread._relays is not None
    thread._hear(thread._relays, link)
    assert known.records["r", 0].index == 8
    thread.close()


def test_a_turn_that_the_kernel_does_not_take_whole_is_sent_as_the_host_reads_it() -> None:
    """Although the model is at rest, and the host has nothing to report before it has the turn."""
    thread, known, host, _ = watched()
    assert known.calls is host.calls
    calls, theirs = socket.socketpair()
    host.calls = HostChannel(calls)
    known.begin([("r-1", 1, 0)], None)
    known.new.append(Arrived("s-1", {"tracewire_block": bytes(32 << 20)}))
    known.begin([("s-1", 1, 0)], None)
    assert known.send([], waits=False) is None
    assert host.calls.unsent
    turn = HostChannel(theirs).receive(30.0)
    assert len(turn) > 32 << 20
    thread.close()


def test_large_arrays_and_all_that_follows_them_go_together() -> None:
    thread, known, host, sent = watched()
    host.says(Chunk("r", "ab" * 8, 0, b"data"))
    host.says(Reported([StepRecord("r", 0, 0, NOTHING)]))
    assert sent.next()[2] == b"data"
    assert sent.next()[1].steps[0].request == "r"
    known.failure = Failure(type="X", message="y")
    thread.lose(known)
    assert sent.next()[1].steps[0].ended == "error"


def test_the_end_of_a_shared_host_ends_each_of_its_traces_and_says_how_many_it_had() -> None:
    thread, known, host, sent = watched()
    add(known, "u", "s")
    host.theirs.close()
    assert {(step.request, step.ended) for step in sent.next().steps} == {("r", "error"), ("s", "error")}
    for name in ("r", "s"):
        thread.finish(known.records[name, 0])
        (finish,) = sent.next().finishes
        assert finish.error.type == "BlockHostLost"
        assert "of this trace and of 1 others of its tenant" in finish.error.message
        assert finish.restart


def test_a_shared_host_stays_when_its_traces_are_over_and_a_trace_s_own_does_not() -> None:
    for kind in (("", True), None):
        thread, known, host, sent = watched()
        known.kind = kind
        trace = known.traces["t"]
        trace.complete = True
        host.says(Reported([], [FinishRecord("r", 0, NOTHING)]))
        assert sent.next().finishes
        settled = threading.Event()
        thread.do(settled.set)
        assert settled.wait(30)
        assert trace.closed
        assert (not known.traces, not known.records, not known.shared_names) == (True, True, True)
        assert host.closed == (kind is None)


@pytest.mark.parametrize("limit", ["IDLE", "IDLE_S"])
def test_hosts_without_traces_are_ended_if_there_are_many_or_after_a_while(
    monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(report_thread, limit, 0)
    _, known, host, sent = watched()
    known.kind = "", True
    known.traces["t"].complete = True
    host.says(Reported([], [FinishRecord("r", 0, NOTHING)]))
    assert sent.next().finishes
    assert host.gone.wait(30)
    assert host.closed
    assert not known.add(HostedTrace("late", known, 1))


def _beside(thread: ReportThread, sent: Sent) -> tuple[BlockHost, Host]:
    """Another host."""
    other: Any = Host()
    quiet = BlockHost(other, None)
    quiet.turns = 9
    add(quiet, "u", "s")
    thread.watch(quiet)
    return quiet, other


def _finished(thread: ReportThread, known: BlockHost, sent: Sent) -> Any:
    while not known.lost:
        sent.next()
    thread.finish(known.records["r", 0])
    while True:
        found = sent.next()
        if finishes := getattr(found[1] if isinstance(found, tuple) else found, "finishes", ()):
            return finishes[0]


def test_a_host_that_sends_more_large_arrays_than_it_may_is_ended_and_no_other() -> None:
    thread, known, host, sent = watched()
    quiet, other = _beside(thread, sent)
    known.arrays.told = 3 * CHUNK_BYTES
    sent.slow = True
    for number in range(8):
        host.says(Chunk("r", "ab" * 8, number, bytes(CHUNK_BYTES)))
    finish = _finished(thread, known, sent)
    assert host.killed
    assert f"what it reported is no report: {5 * CHUNK_BYTES} bytes of large arrays" in finish.error.message
    assert [message.number for message, _ in sent.held if isinstance(message, BlobChunk)] == [0, 1, 2, 3]
    other.says(Reported([StepRecord("s", 0, 0, NOTHING)], turns=1))
    while isinstance(found := sent.next(), tuple):
        pass
    assert found.steps[0].request == "s"
    assert quiet.failure is None


def test_if_more_waits_than_there_is_room_for_the_host_with_the_most_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered_reports, "PassedArrays", partial(PassedArrays, of_all=5 * CHUNK_BYTES))
    thread, known, host, sent = watched()
    quiet, other = _beside(thread, sent)
    sent.slow = True
    for number in range(4):
        host.says(Chunk("r", "ab" * 8, number, bytes(CHUNK_BYTES)))
    other.says(Chunk("s", "cd" * 8, 0, bytes(CHUNK_BYTES)))
    assert "large arrays wait for the bus" in _finished(thread, known, sent).error.message
    assert (host.killed, known.arrays.waiting) == (True, known.arrays.waiting % CHUNK_BYTES)
    assert (other.killed, quiet.failure) == (False, None)
    # What was dropped is not sent, and what was not is.
    given = [data() for message, data in sent.held if isinstance(message, BlobChunk)]
    assert sorted(one is None for one in given) == [False] + [True] * 4


def test_a_host_is_told_with_each_turn_how_much_it_may_send() -> None:
    _, known, host, sent = watched()
    host.says(Chunk("r", "ab" * 8, 0, bytes(CHUNK_BYTES)))
    assert sent.next()[2] == bytes(CHUNK_BYTES)
    assert known.allowed() == LARGE_OF_HOST + CHUNK_BYTES


def test_traces_with_large_arrays_go_apart_from_the_others_of_their_host() -> None:
    _, known, host, sent = watched()
    add(known, "u", "s")
    host.says(Chunk("r", "ab" * 8, 0, b"data"))
    host.says(Reported([StepRecord("r", 0, 0, NOTHING), StepRecord("s", 0, 0, NOTHING)]))
    assert sent.next()[2] == b"data"
    parts = [sent.next(), sent.next()]
    relayed = next(one for one in parts if isinstance(one, tuple))
    (plain,) = [one for one in parts if not isinstance(one, tuple)]
    assert ([one.request for one in relayed[1].steps], [one.request for one in plain.steps]) == (["r"], ["s"])


class Senders(Sent):
    """Notes the threads on which reports are sent."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []

    def send(self, *reports: Any) -> None:
        self.threads.append(threading.get_ident())
        super().send(*reports)


class Left(threading.Event):
    """What the thread waits for while it leaves its work to the model's thread."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_for = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waited_for.set()
        return super().wait(timeout)


def stepping(monkeypatch: pytest.MonkeyPatch) -> tuple[ReportThread, BlockHost, Host, Senders]:
    """A model's first step has begun, and the thread leaves its work to the next steps for an hour."""
    monkeypatch.setattr(report_thread, "_STEP_S", 3600.0)
    host, sent = Host(), Senders()
    link: Any = sent
    process: Any = host
    thread = ReportThread(lambda: link, None)
    thread._hurried = left = Left()
    known = BlockHost(process, None)
    known.turns = 9
    add(known, "t", "r")
    thread.watch(known)
    thread.between_steps()
    # Woken, the thread sees that a step has begun. Before that, it may still do what it woke for earlier.
    thread.do(lambda: None)
    assert left.waited_for.wait(30)
    return thread, known, host, sent


def last_step(monkeypatch: pytest.MonkeyPatch, thread: ReportThread) -> None:
    """Begin a step behind which none follows soon."""
    monkeypatch.setattr(report_thread, "_STEP_S", 0.01)
    thread.between_steps()
    # The thread sleeps for the hour of the step before. It wakes, and sees how long it leaves its work after this one.
    thread._hurried.set()


def test_between_steps_the_model_s_thread_passes_reports_on(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, known, host, sent = stepping(monkeypatch)
    for index in range(3):
        host.says(Reported([StepRecord("r", 0, index, NOTHING)], turns=index + 1))
        while sent.reports.empty():
            thread.between_steps()
        assert sent.reports.get_nowait().steps[0].index == index
    assert sent.threads == [threading.get_ident()] * 3
    assert known.taken == 3


def test_the_thread_passes_reports_on_when_no_step_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, _, host, sent = stepping(monkeypatch)
    last_step(monkeypatch, thread)
    host.says(Reported([StepRecord("r", 0, 0, NOTHING)], turns=1))
    assert sent.next().steps[0].index == 0
    assert threading.get_ident() not in sent.threads


def test_the_model_s_thread_passes_reports_on_while_it_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, known, host, sent = stepping(monkeypatch)
    host.says(Reported([StepRecord("r", 0, 0, NOTHING)], turns=1))
    while not known.taken:
        thread.wait_for_reports(30.0)
    assert sent.threads == [threading.get_ident()]


class Rows:
    """Rows on their way from a GPU."""

    def __init__(self) -> None:
        self.done = self.dropped = False

    def arrive(self, memory: RowMemory) -> None:
        self.done = True

    def drop(self) -> None:
        self.dropped = True


def test_between_steps_turns_leave_when_their_rows_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, known, host, _ = stepping(monkeypatch)
    rows: list[Any] = [Rows(), Rows()]
    turns = [LateTurn(known, Turn([Generated(bytes([number]))]), [one]) for number, one in enumerate(rows)]
    calls = HostChannel(host._other[1])
    rows[1].done = True
    for turn in turns:
        thread.send_later(turn)
    thread.between_steps()
    # In their order.
    assert (calls.arrived(), known.queued) == ([], True)
    rows[0].done = True
    while known.queued:
        thread.between_steps()
    (sent,) = map(msgspec.msgpack.Decoder(Turn).decode, calls.arrived())
    assert (sent.events, known.turns) == ([Generated(b"\0"), Generated(b"\1")], 11)


def test_a_turn_that_the_model_waits_for_leaves_when_its_rows_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, known, host, _ = stepping(monkeypatch)
    late: Any = Rows()
    thread.send_later(LateTurn(known, Turn([], mark=7), [late]))
    thread.send_now((known,))
    assert late.done
    assert HostChannel(host._other[1]).arrived() == [msgspec.msgpack.encode(Turn([], mark=7))]


def test_reports_are_read_while_rows_wait_for_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream waits for a host, and the host until its report is read."""
    thread, known, host, _ = stepping(monkeypatch)
    thread.is_held = lambda: True

    class Behind:
        @property
        def done(self) -> bool:
            return known.taken == 9

        def arrive(self, memory: RowMemory) -> None:
            assert self.done

    host.says(Reported(turns=9))
    behind: Any = Behind()
    thread.send_later(LateTurn(known, Turn([]), [behind]))
    thread.send_now((known,))
    assert HostChannel(host._other[1]).arrived() == [msgspec.msgpack.encode(Turn([]))]


def test_rows_that_cannot_be_shared_cost_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Rows):
        def arrive(self, memory: RowMemory) -> None:
            raise RuntimeError("no such rows")

    thread, known, host, sent = stepping(monkeypatch)
    broken: Any = Broken()
    thread.send_later(LateTurn(known, Turn([]), [broken]))
    thread.send_now((known,))
    while sent.reports.empty():
        thread.between_steps()
    assert sent.next().steps[0].ended == "error"
    assert known.failure is not None
    assert "no such rows" in known.failure.message
    assert (host.killed, known.queued, broken.dropped) == (True, False, True)


def test_hosts_are_told_of_short_steps_together_and_of_long_ones_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, known, host, _ = stepping(monkeypatch)
    calls = HostChannel(host._other[1])
    monkeypatch.setattr(report_thread, "_HELD_S", 3600.0)
    monkeypatch.setattr(report_thread, "_LONG_S", 3600.0)
    for number in range(3):
        thread.send_later(LateTurn(known, Turn([Generated(bytes([number]))]), []))
        thread.between_steps()
        assert thread.short
    assert (calls.arrived(), known.queued) == ([], True)
    monkeypatch.setattr(report_thread, "_LONG_S", 0.0)
    while known.queued:
        thread.between_steps()
    assert not thread.short
    (sent,) = map(msgspec.msgpack.Decoder(Turn).decode, calls.arrived())
    assert [event.message for event in sent.events] == [b"\0", b"\1", b"\2"]


def test_a_host_is_told_of_the_last_step_when_none_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_thread, "_HELD_S", 3600.0)
    monkeypatch.setattr(report_thread, "_LONG_S", 3600.0)
    # The thread looks at nothing by itself.
    monkeypatch.setattr(report_thread, "_LOOK_MS", 3_600_000)
    thread, known, host, _ = stepping(monkeypatch)
    calls = HostChannel(host._other[1])
    thread.send_later(LateTurn(known, Turn([Generated(b"\0")]), []))
    thread.between_steps()
    thread.send_later(LateTurn(known, Turn([Generated(b"\1")]), []))
    last_step(monkeypatch, thread)
    (sent,) = map(msgspec.msgpack.Decoder(Turn).decode, [calls.receive(30)])
    assert [event.message for event in sent.events] == [b"\0", b"\1"]


def test_only_the_turns_of_some_hosts_leave_now(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, known, host, _ = stepping(monkeypatch)
    process: Any = Host()
    other = BlockHost(process, None)
    late: Any = Rows()
    thread.send_later(LateTurn(other, Turn([]), [late]))
    for number in range(2):
        thread.send_later(LateTurn(known, Turn([Generated(bytes([number]))]), []))
    thread.send_now((known,))
    (sent,) = map(msgspec.msgpack.Decoder(Turn).decode, HostChannel(host._other[1]).arrived())
    assert (sent.events, sent.turns) == ([Generated(b"\0"), Generated(b"\1")], 2)
    assert (known.queued, other.queued, late.done) == (False, True, False)


def test_the_thread_does_its_work_at_once_if_it_has_to_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, _, host, sent = stepping(monkeypatch)
    host.says(Reported([StepRecord("r", 0, 0, NOTHING)], turns=1))
    thread.hurry()
    assert sent.next().steps[0].index == 0
    assert threading.get_ident() not in sent.threads


@pytest.mark.parametrize("between", [False, True])
def test_a_closed_thread_ends_whatever_it_waits_for(monkeypatch: pytest.MonkeyPatch, between: bool) -> None:
    """It waits for hosts, or leaves its work to the next steps."""
    thread, _, _, _ = stepping(monkeypatch) if between else watched()
    thread.close()
    assert not thread._thread.is_alive()
