"""Reports a worker's steps to the adapter: the new saves of all live requests in one message a step.

Only the reporting rank (the first of its tensor-parallel group, on the last pipeline stage) has a link to the adapter.
The other ranks run the same blocks and read the same saves, but send nothing.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from tracewire_bus.wire.messages import Append
from tracewire_engine.link.shared_ring import RingCopy
from tracewire_engine.link.step_link import LinkSender
from tracewire_engine.protocol.messages import Applied, FinishRecord, Report, StepRecord
from tracewire_engine.worker.blocks import save_marks, time_limit
from tracewire_engine.worker.blocks.failures import failure_of, is_stop
from tracewire_engine.worker.blocks.request import Request
from tracewire_engine.worker.blocks.shared_values import SharedRun
from tracewire_engine.worker.blocks.standing_blocks import EditedRequest
from tracewire_engine.worker.declared.plan import DeclaredRequests

from .blob_sender import BlobSender, Checked
from .host_copy import HostArray, HostCopy, PinnedCopy, appended, encoded_late
from .requests import RequestProgress, TracedRequests
from .save_tracker import Ending, SaveTracker

__all__ = ["NO_DELTAS", "StepReporter", "encode"]

logger = logging.getLogger("vllm.tracewire")

encode = msgspec.msgpack.Encoder(enc_hook=encoded_late).encode

NO_DELTAS = msgspec.Raw(encode([]))

#: How many reports may wait for bytes on their way to the host before the model waits for them.
MAX_WAITING = 2

#: If steps follow each other faster than this, in seconds, reports with copied bytes are sent two at a time.
PACE_S = 0.004


class PendingReport:
    """A step's report, with the deltas and bytes that are still being copied to the host."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.steps: list[tuple[StepRecord, list[Any], RequestProgress | None]] = []
        self.batch: PinnedCopy | RingCopy | None = None
        #: The copy that was begun last.
        self.copy: PinnedCopy | RingCopy | None = None

    @property
    def urgent(self) -> bool:
        """Whether the adapter waits for more than saves: the end of a request, or an applied change."""
        report = self.report
        return bool(report.finishes or report.applied) or any(step.ended for step in report.steps)

    def complete(self) -> Report:
        """The complete report, valid until `release`. Waits for the copies."""
        for record, deltas, progress in self.steps:
            _encode(record, deltas, progress)
        if self.batch is not None and self.report.batch is not None:
            self.batch.fill(self.report.batch)
        return self.report

    def release(self) -> None:
        """Give back the memory of the report's bytes, after sending."""
        if self.batch is not None:
            self.batch.release()


class StepReporter:
    """Gathers the new saves of the requests of each step, and sends them to the adapter in the order of the steps."""

    def __init__(
        self,
        link: LinkSender | None,
        blobs: BlobSender | None,
        requests: TracedRequests,
        lens: Callable[[torch.Tensor], torch.Tensor | None],
    ) -> None:
        #: `None` on a rank that does not report.
        self.link = link
        self.blobs = blobs
        self._requests = requests
        self._declared: DeclaredRequests = requests.declared
        self._lens = lens
        #: The report of the current step.
        self.unsent = PendingReport(Report())
        #: Reports of earlier steps whose bytes may still be on their way to the host, the earliest first.
        self._waiting: deque[PendingReport] = deque()
        #: When the last message was sent, in seconds since the epoch.
        self._sent_at = 0.0

    def pending(self) -> bool:
        """Whether the current step or an earlier one may have something to send."""
        return bool(self._requests.traced or self._declared.plan is not None or self._waiting)

    def applied(self, changes: list[Applied]) -> None:
        """Add changes of live parameters to the report, with the tokens from which they take effect."""
        self.unsent.report.applied.extend(changes)

    def finish(self, record: FinishRecord, ending: Ending | None = None, checked: Checked | None = None) -> None:
        """Report the end of a choice.

        Args:
            record: is sent with the step's report.
            ending: if given, the blob sender's thread compares it and sends the record instead.
            checked: see `BlobSender.finish`.
        """
        if ending is not None and self.blobs is not None:
            self.blobs.finish(record, ending, checked)
        else:
            self.unsent.report.finishes.append(record)

    def report_step(self) -> None:
        """Add the new saves of this step's requests, and their new shared values, to the report."""
        requests = self._requests
        live: list[tuple[Request, RequestProgress, dict[str, Any]]] = []
        new: list[Any] = []
        reporting = self.link is not None
        for request_id, progress in requests.traced.items():
            if progress.index < 0 or (progress.ended_at is not None and requests.has_ended(request_id)):
                continue
            progress.last = progress.index
            request = requests.requests[request_id]
            mediator = request.mediator
            # If the block was in the step, `TracedRequests.record` noted its saves a moment ago.
            saves = getattr(mediator, "found", None)
            if saves is None or isinstance(request, EditedRequest):
                saves = request.saves()
            if isinstance(request, EditedRequest):
                request.note_errors()
                request.prune()
            if mediator is not None:
                mediator.found = None
                save_marks.prune(mediator, saves)
            if reporting:
                live.append((request, progress, saves))
                _collect_new(progress.tracker, saves, new)
        if live:
            with time_limit.timer_once():
                self._read_saves(live, new)

    def _read_saves(self, live: list[tuple[Request, RequestProgress, dict[str, Any]]], new: list[Any]) -> None:
        """Add the new saves of these requests, and all new shared values, to the report.

        Args:
            live: the requests with their progress and saves.
            new: tensors among the saves to copy to the host; those of shared values are added.
        """
        shared = list(self._requests.shared_runs.runs.values())
        for run in shared:
            _collect_new(run.tracker, run.values, new)
        host = HostCopy(self._requests.budget.threshold)
        try:
            host.prime(new)
        except Exception:  # for example, out of memory: each trace then copies its own arrays, and fails alone
            logger.exception("the arrays of a step could not be copied together")
        late = host.under_way is not None
        for request, progress, saves in live:
            tracker = progress.tracker
            try:
                deltas = tracker.step(saves, host, still=_blocks_are_over(request), index=progress.index)
            except Exception as exception:  # it fails the trace, not the engine
                logger.exception("could not read the saves of %s", request.engine_id)
                deltas = []
                progress.failure = progress.failure or failure_of(exception, None, hint=" (while its saves were read)")
            progress.take_failure()
            if progress.ended_at is not None:
                # The blocks have ended this request, and other blocks of it run until it is aborted. The tracker took
                # these saves only to undo them at the end.
                continue
            ended = _early_end(request, progress)
            if ended:
                progress.ended_at = progress.index
            record = StepRecord(request.engine_id, request.index, progress.index, NO_DELTAS, ended)
            progress.steps += 1
            self._route(record, deltas, tracker, progress, late=late)
        for run in shared:
            self._report_shared(run, host)
        self.unsent.copy = host.under_way

    def _route(
        self,
        record: StepRecord,
        deltas: list[Any],
        tracker: SaveTracker,
        progress: RequestProgress | None,
        *,
        late: bool,
    ) -> None:
        """Send a step's record behind the large arrays of its request if it has any, else with the step's report.

        Args:
            record: of the step.
            deltas: of the step.
            tracker: of the request.
            progress: of the request; `None` for shared values.
            late: whether the bytes are still being copied to the host, so that the deltas are encoded at sending.
        """
        if tracker.large and self.blobs is not None:
            self.blobs.step(record, deltas, tracker.taken)
            return
        self.unsent.report.steps.append(record)
        if deltas and late:
            self.unsent.steps.append((record, deltas, progress))
        elif deltas:
            _encode(record, deltas, progress)

    def _report_shared(self, run: SharedRun, host: HostCopy) -> None:
        """Add the changes of a trace's shared values in this step, if there are any, to the report."""
        tracker = run.tracker
        try:
            deltas = tracker.step(run.values, host)
        except Exception:  # values of a hostile type stay as last sent
            logger.exception("could not read the shared values of %s", run.name)
            return
        if not deltas:
            return
        record = StepRecord(run.name, 0, run.steps, NO_DELTAS)
        run.steps += 1
        self._route(record, deltas, tracker, None, late=host.under_way is not None)

    def report_declared(self) -> None:
        """Add the reads of declared interventions to the report."""
        declared = self._declared
        plan = declared.plan
        if plan is None or not (plan.reads or declared.stale or not plan.steps):
            return
        collected = declared.collect(self._lens)
        unsent = self.unsent
        failed = list(declared.served.failed)
        if declared.stale:
            step = declared.served.step
            failed += [(one.declaration, one.index_in(step)) for one in plan.declarations if one.declaration.failure]
        for declaration, index in failed:
            # A negative index: the step computes a part of the prompt, and a later one reports it.
            if not declaration.reported and index >= 0:
                declaration.reported, declaration.failed_at = True, index
                record = StepRecord(declaration.request, declaration.choice, index, NO_DELTAS, "error")
                unsent.report.steps.append(record)
        link = self.link
        if collected is not None and link is not None:
            unsent.report.layout, unsent.report.batch, flat = collected
            unsent.batch = unsent.copy = link.put(flat, unsent.report) or PinnedCopy(flat)

    def send(self, *, wait: bool = False) -> None:
        """Send the reports whose bytes are on the host, in order. With `wait`, wait for the copies and send all."""
        unsent, waiting = self.unsent, self._waiting
        report = unsent.report
        if report.steps or report.finishes or report.applied or report.batch is not None:
            self.unsent = PendingReport(Report())
            if self.link is not None:
                waiting.append(unsent)
        ready = 0
        now = time.time()
        for earlier in waiting:
            if not earlier.report.time:
                copy = earlier.copy
                if not wait and len(waiting) - ready <= MAX_WAITING and copy is not None and not copy.done:
                    break
                earlier.report.time = now
            ready += 1
        if not ready or self.link is None:
            return
        first = waiting[0]
        soon = 0 <= now - self._sent_at < PACE_S
        if ready == 1 and soon and not wait and first.copy is not None and not first.urgent:
            return
        self._sent_at = now
        sent = [waiting.popleft() for _ in range(ready)]
        self.link.send(*[one.complete() for one in sent])
        for one in sent:
            one.release()


def _collect_new(tracker: SaveTracker, values: Any, found: list[Any]) -> None:
    """Add the new tensors of a trace's values to `found`, as far as they can be found.

    The tracker copies what is missing when it reads the values. There it meets the same error, such as a time that is
    up, and the trace fails.
    """
    try:
        tracker.collect_new(values, found)
    except Exception as exception:
        logger.debug("the new arrays of a step could not all be found: %s", type(exception).__name__)


def _blocks_are_over(request: Request) -> bool:
    """Whether the code of all blocks of this request has ended, in any way."""
    return all(mediator.worker is None or mediator.worker.dead for mediator in request.workers())


def _early_end(request: Request, progress: RequestProgress) -> str:
    """How this request's block ended it early: `"stop"` (`tracer.stop()`) or `"error"`; `""` if it did not."""
    if request.error is not None or progress.failure is not None:
        return "error"
    exception = None if request.mediator is None else request.mediator.exception
    if exception is None:
        return ""
    return "stop" if is_stop(exception) else "error"


def _encoded(deltas: list[Any]) -> bytes:
    """Encode a step's deltas. Waits for the copies of their arrays."""
    delta = deltas[0]
    only = len(deltas) == 1 and type(delta) is Append and len(delta.path) == 1
    if only and all(type(item) is HostArray for item in delta.items):
        # A shortcut for the most common case; the encoder would give the same bytes.
        return appended(delta.path[0], delta.items)
    return encode(deltas)


def _encode(record: StepRecord, deltas: list[Any], progress: RequestProgress | None) -> None:
    """Put a step's deltas into its record. A value that cannot be encoded ends its own request only."""
    try:
        record.deltas = msgspec.Raw(_encoded(deltas))
    except Exception as exception:
        logger.exception("could not encode the saves of %s", record.request)
        if progress is not None:
            progress.failure = progress.failure or failure_of(exception, None, hint=" (while its saves were encoded)")
            progress.ended_at = record.index if progress.ended_at is None else progress.ended_at
            record.ended = record.ended or "error"
