"""Reads what hosts report, so that the model waits for no report, and passes on the ends of their requests.

What blocks have saved goes from their hosts to the save relay, another process (`relay_link.py`), but for the saves of
requests with large arrays.

Each time that the thread wakes, it takes the interpreter from
the model's thread for a moment, which costs more than what it then does. So it gathers what comes within `_GATHER_S`
after a report, and sends it as one message. While one short step follows another it sleeps: the model's thread does the
same work between the steps, when all reports of the last one have come (`between_steps`).

If a host has ended, what it has still reported is passed on first, and then the requests of its traces end with the
error. Hosts of one trace are closed with their trace, and shared ones when they have had no trace for a while.

A host may be in the hands of a hostile block. So what it reports is checked before the adapter is told
(`untrusted_reports.py`), and a host that reports what no host would is ended. What comes behind that is not read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import msgspec

from tracewire_bus.wire.messages import Failure
from tracewire_engine.link.host_channel import ChannelClosed
from tracewire_engine.link.thread_names import name_thread
from tracewire_engine.protocol.block_host import Broken, Chunk, Ready, Reported
from tracewire_engine.protocol.block_host import Report as HostReport
from tracewire_engine.protocol.messages import FinishRecord, Report, StepRecord
from tracewire_engine.protocol.save_relay import Relayed

from .ended_hosts import EndedHosts
from .gathered_reports import GatheredReports
from .host import BlockHost, HostedRequest, HostedTrace, LateTurn
from .places import place_of
from .relay_link import RelayLink, RelayLost
from .save_relays import SaveRelays
from .unsent_turns import UnsentTurns
from .untrusted_reports import UntrustedReport

if TYPE_CHECKING:
    from tracewire_engine.link.step_link import LinkSender
    from tracewire_engine.worker.blob_sender import BlobSender

__all__ = ["ReportThread"]

logger = logging.getLogger("vllm.tracewire")

_reports = msgspec.msgpack.Decoder(HostReport)

#: What the decoding and the checks of a report raise.
_NO_REPORT = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, UntrustedReport)

#: How often hosts that are slow, or idle, are looked for, in milliseconds.
_LOOK_MS = 500

#: How long the thread waits for the reports of other hosts, each time and at most how many times, in seconds.
_GATHER_S, _GATHERED = 0.0002, 3

#: How long reports are waited for at once while rows are waited for, too, in seconds.
_BESIDE_S = 0.0005

#: For how long after the beginning of a step the thread leaves its work to the model's thread, in seconds; and for how
#: long the model's thread waits at once for a host that has to read more of its rows.
_STEP_S, _WAIT_S = 0.005, 0.005

#: How long a step takes at least of which hosts are told at once, and how long shorter ones may wait, in seconds.
_LONG_S, _HELD_S = 0.006, 0.004

#: How long a host that traces share is kept without any, in seconds; and how many such hosts are.
IDLE_S, IDLE = 60.0, 8

#: How long a host may take to report the end of a request that the scheduler has ended, in seconds. A block that asks
#: for the request's output waits until the adapter has published it, and the adapter for Redis.
_ENDING_S = 3600.0

#: How long a process that ends waits for the thread, in seconds.
_CLOSE_S = 2.0

_NO_DELTAS = msgspec.Raw(msgspec.msgpack.encode([]))


# whole: all that is done under one lock
class ReportThread:
    """Passes on the reports of all hosts.

    Args:
        connect: makes an end of the link to the adapter. Called when something is sent first.
        blobs: sends large arrays.
        patience_s: how long a host may take for a turn, in seconds; 0 for any time.
        start_relay: starts a save relay. Called again when the one before has ended.
    """

    def __init__(
        self,
        connect: Callable[[], LinkSender],
        blobs: BlobSender | None,
        patience_s: float = 0.0,
        start_relay: Callable[[], RelayLink] | None = None,
    ) -> None:
        self._patience_s = patience_s
        #: Held by the thread that does the work.
        self._working = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        #: Whether the thread was woken for the jobs that wait.
        self._called = False
        #: Whether a stream may wait for a host (`stream_visits.py`). Then reports are read while rows are waited for
        #: that lie behind that: the host may wait until its report is read.
        self.is_held: Callable[[], bool] = lambda: False
        #: Whether the last step was short, so that a host may be told of it together with the next one.
        self.short = False
        #: Turns that are sent later, in their order.
        self._late: deque[LateTurn] = deque()
        #: Set when the thread has to stop leaving its work to the model's thread.
        self._hurried = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._relays = None if start_relay is None else SaveRelays(start_relay, self._epoll)
        self._hosts: dict[int, BlockHost] = {}
        self._ended, self._unsent = EndedHosts(), UnsentTurns(self._epoll)
        self._gathered = GatheredReports(connect, blobs, self._hosts.values, self._end_overfull)
        #: When hosts are looked at next; and until when the model's thread does the rest.
        self._look_at = self._left_until = self._began_at = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tracewire hosts", daemon=True)
        self._thread.start()

    def watch(self, host: BlockHost) -> None:
        """Pass on what a host reports from now on. Called before the host has a trace.

        Raises:
            OSError: no save relay could be started.
        """
        if self._relays is not None:
            host.saves = self._relays.open(host.process.take_saves())
        host.kept_back = lambda: self.do(lambda: self._unsent.watch(host))
        self.do(lambda: self._watch(host))

    def lose(self, host: BlockHost) -> None:
        """End the requests of a host that has ended, with its `failure`."""
        self.do(lambda: self._lose(host))

    def end(self, host: BlockHost, failure: Failure) -> None:
        """End a host that is gone, or of no use any more, and its requests."""
        if host.fail(failure):
            logger.warning("the host of the blocks of %s has ended: %s", ", ".join(host.traces), failure.message)
        host.process.kill()
        self.lose(host)

    def finish(self, request: HostedRequest) -> None:
        """Report the end of a request, if its host has ended before it could."""
        self.do(lambda: self._finish(request))

    def forget(self, trace: HostedTrace) -> None:
        """Give up a trace when all ends of its requests are reported: the worker sees no more of them."""
        self.do(lambda: self._close_if_over(trace))

    def send_later(self, turn: LateTurn) -> None:
        """Send a host's turn when its rows are on the host (`BlockHost.send`), perhaps with the host's next one."""
        turn.host.late_turns += 1
        self._late.append(turn)
        if len(self._late) == 1:
            os.eventfd_write(self._wake, 1)

    def send_now(self, hosts: Collection[BlockHost]) -> None:
        """Send the turns of these hosts that wait, and of no other host. Waits for their rows."""
        if any(host.queued for host in hosts):
            with self._working:
                turns = [turn for turn in list(self._late) if turn.host in hosts]
                self._read_until_ready(turns)
                self._send_turns(turns)

    def send_ready(self, hosts: Collection[BlockHost]) -> None:
        """Send the turns of these hosts that wait, if that takes no waiting."""
        if any(host.queued for host in hosts) and self._working.acquire(blocking=False):
            try:
                turns = [turn for turn in list(self._late) if turn.host in hosts]
                late = {turn.host for turn in turns if not turn.ready}
                self._send_turns([turn for turn in turns if turn.host not in late])
            finally:
                self._working.release()

    def close(self) -> None:
        """End the thread, then the save relays. Nothing is reported any more.

        A process that ends in the middle of the thread's work could be aborted.
        """
        self._closed = True
        self.hurry()
        os.eventfd_write(self._wake, 1)
        self._thread.join(_CLOSE_S)
        if self._relays is not None:
            self._relays.close()

    def hurry(self) -> None:
        """Have the thread do its work now, although a step has begun a moment ago."""
        self._left_until = 0.0
        self._hurried.set()

    def do(self, job: Callable[[], None]) -> None:
        """Run a job, behind what is done now and the jobs before."""
        self._jobs.put(job)
        if not self._called:
            # Once for all jobs that wait: each time it wakes, the thread takes the interpreter from the model's.
            self._called = True
            os.eventfd_write(self._wake, 1)

    # --- on the model's thread ----------------------------------------------------------------------------------------

    def between_steps(self) -> None:
        """Do what there is to do now, before a step. The thread leaves its work to the next call if that comes soon."""
        now = time.monotonic()
        self.short = now - self._began_at < _LONG_S
        self._began_at, self._left_until = now, now + _STEP_S
        if self._working.acquire(blocking=False):
            try:
                if self._late and (not self.short or now - self._late[0].since >= _HELD_S):
                    self._send_late(wait=False)
                self._handle(self._epoll.poll(0))
                self._gathered.send()
                if self._late:
                    # The thread sends them if no step follows.
                    os.eventfd_write(self._wake, 1)
            finally:
                self._working.release()

    def wait_for_reports(self, seconds: float) -> None:
        """Wait until a host has reported something, such as that it has read its rows, but not for long.

        Args:
            seconds: how long at most.
        """
        self._left_until = time.monotonic() + _STEP_S
        with self._working:
            self._send_late(wait=True)
            self._handle(self._epoll.poll(min(seconds, _WAIT_S)))
            self._gathered.send()

    # --- on the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        name_thread("reports")
        while not self._closed:
            now = time.monotonic()
            if now >= self._look_at:
                with self._working:
                    self._look()
                    self._gathered.send()
                self._look_at = time.monotonic() + _LOOK_MS / 1000
            elif now < self._left_until:
                self._hurried.wait(min(self._left_until, self._look_at) - now)
                self._hurried.clear()
            else:
                # Without hosts, too: the model's thread may take the event by which this one would hear of the first.
                ready = self._epoll.poll(_LOOK_MS / 1000)
                if time.monotonic() >= self._left_until:
                    with self._working:
                        self._gather(ready)

    def _gather(self, ready: list[tuple[int, int]]) -> None:
        """Handle what is ready, and what comes soon."""
        self._send_late(wait=True)
        self._handle(ready)
        for _ in range(_GATHERED):
            if not self._gathered or not any(host.owes(0.0) for host in self._hosts.values()):
                break
            time.sleep(_GATHER_S)
            self._handle(self._epoll.poll(0))
        self._gathered.send()
        if self._late:
            # Their event may have been taken with the one before.
            os.eventfd_write(self._wake, 1)

    # --- on the one that does the work --------------------------------------------------------------------------------

    def _handle(self, ready: list[tuple[int, int]]) -> None:
        for descriptor, events in ready:
            try:
                if descriptor == self._wake:
                    self._work()
                elif self._relays is not None and (relay := self._relays.at(descriptor)) is not None:
                    self._hear(self._relays, relay)
                elif (host := self._hosts.get(descriptor)) is not None:
                    self._read(host, events)
                elif (host := self._unsent.at(descriptor)) is not None:
                    self._flush(host)
            except Exception:  # it serves all traces
                logger.exception("a report of a host of blocks could not be passed on")

    def _look(self) -> None:
        """End hosts that are too slow, and those that have been without a trace for long, or the longest."""
        if self._relays is not None:
            self._relays.look()
        for host in self._ended.late():
            self._take_passed(host, None)
        hosts = list(self._hosts.values())
        for host in hosts if self._patience_s else ():
            if host.failure is None and host.owes(self._patience_s):
                host.fail(too_slow(host, self._patience_s, "within one step"))
                self._lose(host)
        for host in hosts:
            if host.failure is None and host.withholds(_ENDING_S):
                host.fail(lost(f"it has not reported the end of a request for {_ENDING_S:g} s", len(host.traces)))
                self._lose(host)
        idle = [host for host in hosts if not host.traces]
        idle.sort(key=lambda host: host.idle_since, reverse=True)
        for place, host in enumerate(idle):
            if (place >= IDLE or time.monotonic() - host.idle_since > IDLE_S) and host.retire():
                self._close(host)

    def _work(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the other thread has done it
            os.eventfd_read(self._wake)
        self._called = False
        while not self._jobs.empty():
            try:
                self._jobs.get()()
            except Exception:  # the other jobs are of other traces
                logger.exception("a job of the hosts of blocks failed")

    def _send_late(self, *, wait: bool) -> None:
        """Send the turns whose rows are on the host, or all turns if this may wait for rows: each host's as one."""
        if wait:
            self._read_until_ready(list(self._late))
        ready = []
        for turn in list(self._late):
            if not wait and not turn.ready:
                break
            ready.append(turn)
        self._send_turns(ready)

    def _read_until_ready(self, turns: list[LateTurn]) -> None:
        """If a stream may wait for a host, read reports until the rows of turns are on the host."""
        while self.is_held() and not all(turn.ready for turn in turns):
            self._handle(self._epoll.poll(_BESIDE_S))

    def _send_turns(self, turns: list[LateTurn]) -> None:
        """Send some of the turns that wait: each host's as one."""
        joined: dict[BlockHost, LateTurn] = {}
        for turn in turns:
            self._late.remove(turn)
            first = joined.setdefault(turn.host, turn)
            if first is not turn:
                first.join(turn)
        for host, turn in joined.items():
            try:
                turn.send()
            except Exception as error:  # it costs the host, not the engine
                host.fail(lost_by(error, host))
                self._lose(host)
            finally:
                host.late_sent += turn.turns

    def _hear(self, relays: SaveRelays, relay: RelayLink) -> None:
        """End the hosts that have sent the relay what no host sends, or all of them if the relay has ended.

        And end the requests of hosts of which the relay has said what it has passed on.
        """
        watched = [one for one in self._hosts.values() if one.saves and one.saves.link is relay]
        hosts = {one.saves.number: one for one in (*watched, *self._ended.of(relay)) if one.saves}
        gone: RelayLost | None = None
        try:
            relay.hear()
        except RelayLost as error:
            gone = error
        for refused in relay.refused():
            if (host := hosts.get(refused.host)) is not None and not host.lost:
                host.fail(lost(f"what it saved is no save: {refused.why}", len(host.traces)))
                self._lose(host, trusted=False)
        for number, passed in relay.answers():
            if (host := hosts.get(number)) is not None:
                self._take_passed(host, passed)
        if gone is not None:
            logger.error("%s; the traces of its hosts run again", gone)
            relays.drop(relay)
            for host in hosts.values():
                host.fail(lost(str(gone), len(host.traces)), blameless=True)
                self._lose(host)
                self._take_passed(host, None)

    def _watch(self, host: BlockHost) -> None:
        descriptor = host.process.reports.fileno()
        self._hosts[descriptor] = host
        self._gathered.watch(host)
        self._epoll.register(descriptor, select.EPOLLIN)
        if host.saves is not None and host.saves.link.lost:
            # It may have been heard of before.
            host.fail(lost(str(RelayLost()), len(host.traces)), blameless=True)
            self._lose(host)

    def _unwatch(self, host: BlockHost) -> None:
        for descriptor, one in list(self._hosts.items()):
            if one is host:
                del self._hosts[descriptor]
                with contextlib.suppress(OSError):  # it is closed, and not watched any more
                    self._epoll.unregister(descriptor)
        self._unsent.forget(host)

    def _flush(self, host: BlockHost) -> None:
        try:
            self._unsent.send(host)
        except ChannelClosed as error:
            host.fail(lost_by(error, host))
            self._lose(host)

    def _close(self, host: BlockHost) -> None:
        self._unwatch(host)
        self._ended.forget(host)
        host.process.close()
        saves, host.saves = host.saves, None
        if saves is not None and not host.lost:
            saves.close()

    def _read(self, host: BlockHost, events: int) -> None:
        try:
            if events & ~select.EPOLLIN:
                host.calls.flush()
            for message in host.process.reports.arrived():
                if not host.lost:
                    self._pass_on(host, _reports.decode(message))
            if host.failure is not None:
                self._lose(host)
        except (ChannelClosed, *_NO_REPORT) as error:
            why = "" if isinstance(error, ChannelClosed) else f"what it reported is no report: {error}"
            host.fail(lost(why, len(host.traces)))
            self._lose(host, trusted=isinstance(error, ChannelClosed))

    def _pass_on(self, host: BlockHost, report: HostReport) -> None:
        host.untrusted.check(report, host.turns)
        if isinstance(report, Reported):
            steps = _steps_of(host, report.steps)
            finishes = [finish for finish in report.finishes if _is_finish_of(host, finish)]
            taken = host.taken
            host.took(report.turns, report.mark)
            if host.reads is not None:
                host.worked(report.used_us, max(1, host.taken - taken))
            over = {one.trace for finish in finishes if (one := _request_of(host, finish)) is not None}
            if steps or finishes:
                self._gathered.add(host, Report(time=time.time(), steps=steps, finishes=finishes))
            for trace in over:
                self._close_if_over(trace)
        elif isinstance(report, Chunk):
            self._gathered.add_chunk(host, report)
        elif isinstance(report, Ready):
            for missing in report.missing:
                logger.warning("a host of blocks is less confined than it could be: %s", missing)
        elif isinstance(report, Broken):
            host.fail(lost(report.message, len(host.traces)))

    def _end_overfull(self, host: BlockHost, waiting: int) -> None:
        host.fail(lost(f"{waiting} bytes of its large arrays wait for the bus", len(host.traces)))
        self._lose(host, trusted=False)

    def _lose(self, host: BlockHost, *, trusted: bool = True) -> None:
        """End a host's requests. What it has still reported is passed on first, if it is `trusted`."""
        if not host.lost:
            host.lost = True
            # First, so that a host which goes on reporting comes to an end.
            host.process.kill()
            try:
                for message in host.process.reports.last() if trusted else ():
                    self._pass_on(host, _reports.decode(message))
            except (ChannelClosed, *_NO_REPORT):
                pass
            self._unwatch(host)
            self._ended.ask(host, trusted=trusted)
        if host not in self._ended:
            self._end_requests(host)

    def _take_passed(self, host: BlockHost, passed: list[Relayed] | None) -> None:
        if self._ended.take(host, passed):
            self._end_requests(host)

    def _end_requests(self, host: BlockHost) -> None:
        """End the requests of a host that has ended."""
        requests = list(host.records.values())
        steps = []
        for one in requests:
            if not one.ended and not one.over:
                one.ended, one.index, one.steps = True, one.index + 1, one.steps + 1
                steps.append(StepRecord(one.request, one.choice, one.index, _NO_DELTAS, "error"))
        if steps:
            self._gathered.add(host, Report(time=time.time(), steps=steps))
        for one in requests:
            if one.finished:
                self._finish(one)
        if host.retire():
            self._close(host)

    def _finish(self, one: HostedRequest) -> None:
        one.finished, one.finished_at = True, time.monotonic()
        host = one.trace.host
        if one.over or not host.lost or host in self._ended:
            return
        one.over = True
        record = FinishRecord(one.request, one.choice, _NO_DELTAS, error=host.failure, steps=one.steps)
        record.tokens, record.restart = one.index + 1, host.failed_together
        self._gathered.add(host, Report(time=time.time(), finishes=[record]))
        self._close_if_over(one.trace)

    def _close_if_over(self, trace: HostedTrace) -> None:
        if trace.closed or not trace.complete or not all(one.over for one in trace.requests.values()):
            return
        host = trace.host
        host.drop(trace)
        self._gathered.forget(trace)
        if (host.kind is None or host.lost) and host.retire():
            self._close(host)
        trace.closed = True


def _steps_of(host: BlockHost, steps: list[StepRecord]) -> list[StepRecord]:
    """Those of these records that are of a host's own requests, or of values that its traces share."""
    records, found = host.records, []
    for step in steps:
        one = records.get((step.request, step.choice))
        if one is not None:
            one.index, one.steps = step.index, one.steps + 1
            if step.ended:
                one.ended = True
            found.append(step)
        elif step.choice == 0 and step.request in host.shared_names:
            found.append(step)
    return found


def _is_finish_of(host: BlockHost, finish: FinishRecord) -> bool:
    one = _request_of(host, finish)
    if one is None and not (finish.choice == 0 and finish.request in host.shared_names):
        return False
    if one is not None:
        one.over = True
    if host.saves is not None:
        host.saves.over(finish.request, finish.choice)
    return True


def _request_of(host: BlockHost, record: StepRecord | FinishRecord) -> HostedRequest | None:
    return host.records.get((record.request, record.choice))


def too_slow(host: BlockHost, seconds: float, how: str) -> Failure:
    """The error of the traces of a host that did not answer in time."""
    if len(host.traces) > 1:
        return lost(f"a block ran for {seconds:g} s {how}", len(host.traces))
    filename, line, source, trace = place_of(host.process.places(), host.block) or (None, None, None, None)
    return Failure(
        type="BlockTimeout",
        message=f"the block ran for {seconds:g} s {how}; to loop over the steps write `for step in tracer.iter[:]`, "
        "and leave a loop that is done with `break`",
        field="block",
        filename=filename,
        line=line,
        source=source,
        traceback=trace,
        builtin="Exception",
    )


def lost_by(error: Exception, host: BlockHost) -> Failure:
    """The error of the traces of a host with which something could not be done."""
    return lost("" if isinstance(error, ChannelClosed) else f"{type(error).__name__}: {error}", len(host.traces))


def lost(why: str, traces: int = 1) -> Failure:
    """The error of traces whose host has ended. `traces` is how many it had."""
    message = "the process that ran this trace's blocks has ended"
    if traces > 1:
        message = f"the process that ran the blocks of this trace and of {traces - 1} others of its tenant has ended"
    return Failure(type="BlockHostLost", message=f"{message}: {why}" if why else message, field="block")
