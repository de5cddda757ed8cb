"""Ends the blocks of requests that are over, and reports all of their saves."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec
from nnsight.intervention.envoy import Envoy

from tracewire_bus.wire.digests import digest
from tracewire_bus.wire.messages import Failure, Manifest
from tracewire_engine.protocol.messages import FinishRecord
from tracewire_engine.worker.blocks import save_marks, time_limit
from tracewire_engine.worker.blocks.failures import failure_of, is_stop
from tracewire_engine.worker.blocks.mediator import RESULT, BlockMediator
from tracewire_engine.worker.blocks.plain_values import plain, trim
from tracewire_engine.worker.blocks.request import Request
from tracewire_engine.worker.blocks.shared_values import SharedRun
from tracewire_engine.worker.blocks.standing_blocks import EditedRequest

from .host_copy import HostCopy
from .reporting import NO_DELTAS, StepReporter, encode
from .request_book import end_waiting
from .requests import RequestProgress, TracedRequests
from .save_tracker import Ending

__all__ = ["RequestFinisher"]

logger = logging.getLogger("vllm.tracewire")

_Counted: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any]]


class RequestFinisher:
    """Ends the blocks of requests that the scheduler has ended, and reports their saves."""

    def __init__(
        self,
        requests: TracedRequests,
        reporter: StepReporter,
        collect: Callable[[Request], dict[str, Any]] | None = None,
    ) -> None:
        self._requests = requests
        self._reporter = reporter
        #: For checks: nnsight's own collect, with which the digests of a request's saves are compared.
        self._collect = collect

    def finish_requests(self, finished: set[str], tokens: dict[str, int]) -> None:
        """End the blocks of requests that the scheduler has ended, report the requests and forget them.

        Args:
            finished: the scheduler's ids of the requests.
            tokens: how many tokens each request has, where the scheduler knows it.
        """
        requests = self._requests
        for request_id in finished:
            progress = requests.traced.pop(request_id, None)
            request = requests.requests.get(request_id) or Request(request_id)
            declaration = requests.declared.pop(request_id)
            requests.leave(request_id)
            if requests.pipeline is not None:
                requests.pipeline.forget(request_id)
            if requests.ranks is not None and request_id not in requests.requests:
                requests.ranks.forget(request_id)
            failed_at = None if declaration is None else declaration.failed_at
            failure = None if declaration is None else declaration.failure
            if requests.hosts is not None and requests.hosts.finish(
                request_id, tokens.get(request_id), failure, failed_at
            ):
                continue
            if progress is None:
                record = FinishRecord(request.engine_id, request.index, NO_DELTAS, error=failure)
                self._reporter.finish(record)
                self._leave_shared(request)
                continue
            if declaration is not None and declaration.failure is not None:
                request.error = request.error or declaration.failure
                if declaration.failed_at is not None and progress.ended_at is None:
                    progress.ended_at = declaration.failed_at
            progress.tokens = tokens.get(request_id)
            del requests.requests[request_id]
            told = progress.tells_end or progress.asks_result
            waits = progress.tells_end or (progress.asks_result and _waits_for_result(request))
            if waits and not requests.results.has(request.engine_id):
                requests.results.waiting.setdefault(request.engine_id, []).append((request, progress))
                continue
            self.wind_up(request, progress)
            if told and not any(other.engine_id == request.engine_id for other in requests.requests.values()):
                requests.results.forget(request.engine_id)
        if requests.hosts is not None:
            requests.hosts.tell_ends()

    def take_result(self, generated: bytes) -> None:
        """Take the adapter's message about an ended request, and end its blocks that waited for the message."""
        requests = self._requests
        name, waiting = requests.results.take(generated)
        for request, progress in waiting:
            self.wind_up(request, progress)
        if not any(other.engine_id == name for other in requests.requests.values()):
            requests.results.forget(name)
        self._reporter.send(wait=True)

    def wind_up(self, request: Request, progress: RequestProgress) -> None:
        """End the blocks of a request that is over, and report the request."""
        requests = self._requests
        mediator: BlockMediator | None = request.mediator
        covered = self._covered(request, progress)
        counted = self._rewind(request, progress, covered)
        if mediator is not None:
            with time_limit.turn():
                result = requests.results.output(request.engine_id) if progress.asks_result else None
                if result is not None:
                    mediator.serve_result(result)
                end_waiting(mediator)
            requests.record(mediator)
        if isinstance(request, EditedRequest):
            for _, copy in request.mediators():
                with time_limit.turn():
                    end_waiting(copy)
                requests.record(copy)
            request.note_errors()
        travels = self._reporter.link is not None and self._report_finish(request, progress, covered, counted)
        if isinstance(request, EditedRequest):
            request.dispose()
        if mediator is not None:
            save_marks.release(mediator)
            mediator.dispose()
        counted = dict  # the function holds saves
        if not travels:
            _free(progress)
        self._leave_shared(request)
        if requests.ranks is not None:
            requests.ranks.forget(request.id)

    def _covered(self, request: Request, progress: RequestProgress) -> int | None:
        """How many tokens a request that is over has; `None` if that is not known.

        The scheduler, the adapter and the request's blocks can each have ended it. The least number counts.
        """
        told = self._requests.results.tokens(request.engine_id, request.index)
        ended = None if progress.ended_at is None else progress.ended_at + 1
        counts = [count for count in (progress.tokens, told, ended) if count is not None]
        return min(counts, default=None)

    def _rewind(self, request: Request, progress: RequestProgress, covered: int | None) -> _Counted:
        """Undo the saves that a request's blocks made in steps whose tokens are not part of the request.

        Returns:
            A function that turns the blocks' saves into those that count.
        """
        if covered is None or covered > progress.last or self._reporter.link is None:
            return dict
        counted = progress.tracker.rewind(request.saves(), covered)
        for mediator in request.workers():
            trim(mediator.made)
        return counted

    def _leave_shared(self, request: Request) -> None:
        run = self._requests.shared_runs.leave(request.engine_id, request.index)
        if run is not None:
            if self._reporter.link is not None:
                self._report_shared_end(run)
            run.dispose()

    def _report_finish(
        self, request: Request, progress: RequestProgress, covered: int | None, read_counted: _Counted
    ) -> bool:
        """Report a request's end: how its blocks ended, and the part of their saves that no step's report had.

        Returns:
            Whether another thread still reads the saves.
        """
        tracker = progress.tracker
        record = FinishRecord(request.engine_id, request.index, NO_DELTAS, steps=progress.steps)
        record.tokens = -1 if covered is None else covered
        own = request.saves()
        saves = read_counted(own)
        ending: Ending | None = None
        later = False
        collected: dict[str, Any] = {}

        def check(manifest: list[Manifest]) -> None:
            made: dict[int, tuple[Any, Any]] = {}
            for entry in manifest if collected else ():
                if saves[entry.name] is own.get(entry.name):
                    entry.digest = digest(HostCopy()(plain(collected[entry.name], made)))

        error = request.error or progress.failure
        try:
            with tracker.guard():
                ending = tracker.ending(saves, 0, request.index)
                # Large arrays do not travel in the order of the link, so the adapter cannot digest them on the way.
                ending.passed = not tracker.large
                # On a GPU the values to compare are still being copied to the host, and the model does not wait.
                later = tracker.large or (tracker.late and self._collect is None)
                if not later:
                    deltas, record.manifest, _ = ending.compare()
                    record.deltas = msgspec.Raw(encode(deltas))
                progress.take_failure()
                error = error or progress.failure
                # nnsight's collect would fail on a save that cannot be read.
                if self._collect is not None and tracker.broken is None:
                    collected = self._collect(request)
                    check(record.manifest)
        except Exception as exception:  # a save of a hostile type fails its trace, not the engine
            logger.exception("could not report the saves of %s", request.engine_id)
            error = error or failure_of(exception, None, hint=" (while its saves were read)")
        record.save_errors = tracker.errors
        if isinstance(request, EditedRequest):
            record.edit_errors = request.edit_errors
        if covered is None or progress.ended_at is None or progress.ended_at < covered:
            self._add_outcome(record, request, progress, error)
        # Otherwise the block ended in the step of a token that is not part of the request, which does not count.
        self._reporter.finish(record, ending if later else None, check)
        return later

    @staticmethod
    def _add_outcome(record: FinishRecord, request: Request, progress: RequestProgress, error: Failure | None) -> None:
        """Add to the record how a request's block ended: with an error, by `tracer.stop()`, or with warnings."""
        mediator: BlockMediator | None = request.mediator
        if error is None and mediator is not None:
            if mediator.exception is not None:
                record.stopped = is_stop(mediator.exception)
                if not record.stopped:
                    error = failure_of(mediator.exception, mediator.compiled, hint=_hint(mediator.exception))
            elif mediator.waited_in_vain and mediator.raised is not None:
                # When its request ended, the block still waited for a location that the model had passed before.
                error = failure_of(mediator.raised, mediator.compiled)
        record.error = error
        if error is None and mediator is not None:
            record.warnings = mediator.warnings(progress.last + 1)

    def _report_shared_end(self, run: SharedRun) -> None:
        """Report the final shared values of a trace, all of whose requests are over."""
        tracker, record = run.tracker, FinishRecord(run.name, 0, NO_DELTAS, steps=run.steps)
        try:
            with tracker.guard():
                # A copy of the dict, since another thread may compare it later.
                ending = tracker.ending(dict(run.values), 0, 0)
                ending.passed = not tracker.large
                record.save_errors = tracker.errors
                if tracker.broken is not None:
                    name, raised = tracker.broken
                    record.error = failure_of(raised, None, hint=f" (while the shared value {name!r} was read)")
                later = tracker.large or tracker.late
                if not later:
                    deltas, record.manifest, _ = ending.compare()
                    record.deltas = msgspec.Raw(encode(deltas))
            if later:
                return self._reporter.finish(record, ending)
        except Exception as exception:
            logger.exception("could not report the shared values of %s", run.name)
            record.error = failure_of(exception, None, hint=" (while the shared values were read)")
        self._reporter.finish(record)


def _free(progress: RequestProgress) -> None:
    """Free the saves that a request's tracker holds, within limited time: finalizers may be the block's code."""
    try:
        with time_limit.turn(building=True):
            progress.tracker.clear()
    except Exception as exception:
        logger.debug("freeing the saves of an ended block failed: %s", type(exception).__name__)


def _hint(exception: BaseException) -> str:
    """A hint for the message of an error about a module path that does not exist: the nearest name that does."""
    if not isinstance(exception, AttributeError) or not exception.name:
        return ""
    owner = exception.obj if isinstance(exception.obj, Envoy) else None
    if owner is None:
        return ""
    children = [name for name, _ in owner._module.named_children()]
    near = difflib.get_close_matches(exception.name, children, 1, 0.4)
    where = owner.path or "the model"
    return f" ({where} has no {exception.name!r}" + (f"; did you mean {near[0]!r}?)" if near else ")")


def _waits_for_result(request: Request) -> bool:
    """Whether the request's block is parked at `tracer.result`."""
    mediator = request.mediator
    pending = getattr(mediator, "pending", None)
    return mediator is not None and mediator.alive and pending is not None and pending.provider == RESULT
