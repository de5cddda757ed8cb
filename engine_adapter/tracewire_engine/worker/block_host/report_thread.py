"""Passes on what hosts report, on a thread, so that the model waits for no report.

The thread sends the adapter the saves of each step as they come. If a host has ended, the thread first passes on all
that the host has still reported, and then ends the trace's requests with the error.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from tracewire_bus.wire.messages import Failure
from tracewire_engine.link.blob_receiver import BlobChunk
from tracewire_engine.link.host_channel import ChannelClosed
from tracewire_engine.link.thread_names import name_thread
from tracewire_engine.protocol.block_host import Broken, Chunk, Ready, Reported
from tracewire_engine.protocol.block_host import Report as HostReport
from tracewire_engine.protocol.messages import FinishRecord, Report, StepRecord

from .hosted_trace import HostedTrace

if TYPE_CHECKING:
    from tracewire_engine.link.step_link import LinkSender
    from tracewire_engine.worker.blob_sender import BlobSender

__all__ = ["ReportThread"]

logger = logging.getLogger("vllm.tracewire")

_reports = msgspec.msgpack.Decoder(HostReport)

#: How often hosts that are slow are looked for, in milliseconds.
_LOOK_MS = 500

_NO_DELTAS = msgspec.Raw(msgspec.msgpack.encode([]))


class ReportThread:
    """Passes on the reports of all hosts.

    Args:
        connect: makes the thread's own end of the link to the adapter. Called on the thread.
        blobs: sends large arrays.
        patience_s: how long a host may take for a turn, in seconds; 0 for any time.
    """

    def __init__(self, connect: Callable[[], LinkSender], blobs: BlobSender | None, patience_s: float = 0.0) -> None:
        self._connect, self._blobs, self._patience_s = connect, blobs, patience_s
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._traces: dict[int, HostedTrace] = {}
        self._large: set[str] = set()
        self._lost: set[str] = set()
        #: Signals that a host has read more of its rows.
        self.returned = threading.Condition()
        threading.Thread(target=self._run, name="tracewire hosts", daemon=True).start()

    def watch(self, trace: HostedTrace) -> None:
        """Pass on what the trace's host reports from now on."""
        self._do(lambda: self._watch(trace))

    def lose(self, trace: HostedTrace) -> None:
        """End the requests of a trace whose host has ended, with the trace's `failure`."""
        self._do(lambda: self._lose(trace))

    def finish(self, trace: HostedTrace, request_id: str) -> None:
        """Report the end of a request, if the trace's host has ended before it could."""
        self._do(lambda: self._finish(trace, request_id))

    def forget(self, trace: HostedTrace) -> None:
        """End the host of a trace when all ends of its requests are reported: the worker sees no more of them."""
        self._do(lambda: self._close_if_over(trace))

    def send_later(self, trace: HostedTrace, send: Callable[[], None]) -> None:
        """Send a trace's turn as soon as its rows are on the host (`HostedTrace.send`)."""
        with self.returned:
            trace.queued += 1
        self._do(lambda: self._send_turn(trace, send))

    def wait_for(self, trace: HostedTrace) -> None:
        """Wait until no turn of a trace waits for its rows."""
        with self.returned:
            self.returned.wait_for(lambda: not trace.queued)

    def _do(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        os.eventfd_write(self._wake, 1)

    # --- on the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        name_thread("reports")
        self._link = self._connect()
        while True:
            self._check_patience()
            for descriptor, events in self._poll.poll(_LOOK_MS if self._traces else None):
                try:
                    if descriptor == self._wake:
                        self._work()
                    elif (trace := self._traces.get(descriptor)) is not None:
                        self._read(trace, events)
                except Exception:  # it serves all traces
                    logger.exception("a report of a host of blocks could not be passed on")

    def _check_patience(self) -> None:
        for trace in list(self._traces.values()) if self._patience_s else ():
            if trace.failure is None and trace.owes(self._patience_s):
                trace.failure = too_slow(self._patience_s, "within one step")
                self._lose(trace)

    def _work(self) -> None:
        os.eventfd_read(self._wake)
        while not self._jobs.empty():
            self._jobs.get()()

    def _send_turn(self, trace: HostedTrace, send: Callable[[], None]) -> None:
        try:
            send()
        except ChannelClosed:
            trace.failure = trace.failure or lost("")
            self._lose(trace)
        finally:
            with self.returned:
                trace.queued -= 1
                self.returned.notify_all()

    def _watch(self, trace: HostedTrace) -> None:
        descriptor = trace.host.reports.fileno()
        self._traces[descriptor] = trace
        self._poll.register(descriptor, select.POLLIN)

    def _unwatch(self, trace: HostedTrace) -> None:
        for descriptor, one in list(self._traces.items()):
            if one is trace:
                del self._traces[descriptor]
                self._poll.unregister(descriptor)

    def _read(self, trace: HostedTrace, events: int) -> None:
        try:
            if events & ~select.POLLIN or trace.calls.unsent:
                trace.calls.flush()
            for message in trace.host.reports.arrived():
                self._pass_on(trace, _reports.decode(message))
        except (ChannelClosed, msgspec.DecodeError) as error:
            if trace.failure is None:
                trace.failure = lost(f"{error}" if isinstance(error, msgspec.DecodeError) else "")
            self._lose(trace)

    def _pass_on(self, trace: HostedTrace, report: HostReport) -> None:
        if isinstance(report, Reported):
            steps = [step for step in report.steps if self._is_step_of(trace, step)]
            finishes = [finish for finish in report.finishes if self._is_finish_of(trace, finish)]
            with self.returned:
                trace.took(report.turns, report.mark)
                self.returned.notify_all()
            if steps or finishes:
                self._send(trace, Report(time=time.time(), steps=steps, finishes=finishes))
            self._close_if_over(trace)
        elif isinstance(report, Chunk):
            self._large.add(trace.name)
            names = {request for request, _ in trace.records} | trace.shared_names
            if self._blobs is not None and report.request in names:
                chunk = BlobChunk(report.request, report.blob, report.number)
                self._blobs.relay((trace.name, 0), chunk, report.data)
        elif isinstance(report, Ready):
            for missing in report.missing:
                logger.warning("a host of blocks is less confined than it could be: %s", missing)
        elif isinstance(report, Broken):
            trace.failure = trace.failure or lost(report.message)

    @staticmethod
    def _is_step_of(trace: HostedTrace, step: StepRecord) -> bool:
        one = trace.records.get((step.request, step.choice))
        if one is None:
            return step.request in trace.shared_names
        one.index, one.steps = step.index, one.steps + 1
        one.ended = one.ended or bool(step.ended)
        return True

    @staticmethod
    def _is_finish_of(trace: HostedTrace, finish: FinishRecord) -> bool:
        one = trace.records.get((finish.request, finish.choice))
        if one is None:
            return finish.request in trace.shared_names
        one.over = True
        return True

    def _send(self, trace: HostedTrace, report: Report) -> None:
        if trace.name in self._large and self._blobs is not None:
            self._blobs.relay((trace.name, 0), report)
        else:
            self._link.send(report)

    def _lose(self, trace: HostedTrace) -> None:
        if trace.name in self._lost:
            return
        self._lost.add(trace.name)
        try:
            while messages := trace.host.reports.arrived():
                for message in messages:
                    self._pass_on(trace, _reports.decode(message))
        except (ChannelClosed, msgspec.DecodeError):
            pass
        steps = []
        for one in trace.requests.values():
            if not one.ended and not one.over:
                one.ended, one.index, one.steps = True, one.index + 1, one.steps + 1
                steps.append(StepRecord(one.request, one.choice, one.index, _NO_DELTAS, "error"))
        if steps:
            self._send(trace, Report(time=time.time(), steps=steps))
        with self.returned:
            self.returned.notify_all()
        self._unwatch(trace)
        trace.host.kill()
        for one in trace.requests.values():
            if one.finished:
                self._finish(trace, one.id)

    def _finish(self, trace: HostedTrace, request_id: str) -> None:
        one = trace.requests[request_id]
        one.finished = True
        if one.over or trace.name not in self._lost:
            return
        one.over = True
        record = FinishRecord(one.request, one.choice, _NO_DELTAS, error=trace.failure, steps=one.steps)
        record.tokens = one.index + 1
        self._send(trace, Report(time=time.time(), finishes=[record]))
        self._close_if_over(trace)

    def _close_if_over(self, trace: HostedTrace) -> None:
        if trace.closed or not trace.complete or not all(one.over for one in trace.requests.values()):
            return
        self._unwatch(trace)
        self._lost.discard(trace.name)
        self._large.discard(trace.name)
        trace.host.close()
        trace.closed = True


def too_slow(seconds: float, how: str) -> Failure:
    """The error of a trace whose host did not answer in time."""
    return Failure(
        type="BlockTimeout",
        message=f"the block ran for {seconds:g} s {how}; to loop over the steps write `for step in tracer.iter[:]`, "
        "and leave a loop that is done with `break`",
        field="block",
        builtin="Exception",
    )


def lost(why: str) -> Failure:
    """The error of a trace whose host has ended."""
    message = "the process that ran this trace's blocks has ended"
    return Failure(type="BlockHostLost", message=f"{message}: {why}" if why else message, field="block")
