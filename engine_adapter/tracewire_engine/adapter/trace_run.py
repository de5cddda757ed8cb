"""One attempt of one trace: from its validated invokes to its final event.

The adapter publishes an output when vLLM has put out its tokens and the workers have reported the saves of the steps
that sampled them (`pending.py`).

Appending waits for Redis. Meanwhile vLLM merges further outputs of the same request. A slow bus therefore gets fewer
and larger entries, and a fast one gets each output at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from tracewire_bus.bus import BusFull, EntryTooLarge, Fenced, Writer
from tracewire_bus.domain.identity import Key
from tracewire_bus.domain.intervention_checks import substitute_live
from tracewire_bus.domain.limit_table import LimitCounts
from tracewire_bus.store.blobs import Blobs
from tracewire_bus.transport.errors import first_error
from tracewire_bus.wire.codec import encoded_size
from tracewire_bus.wire.messages import (
    EngineInfo,
    Event,
    Failure,
    Final,
    FirstToken,
    Lagging,
    Paused,
    Reading,
    Restarted,
    Resumed,
    Status,
    StopWhen,
    Submission,
    Usage,
)
from tracewire_bus.wire.packing import unpack
from tracewire_bus.wire.pieces import Pieces
from tracewire_engine.protocol.messages import Applied

from .bulk_writer import BulkWriter
from .engine_api import Choice, Engine, EngineLost, Outputs, Prepared, Rejection
from .large_inputs import Inputs
from .live_changes import LiveTrace, Steering, take_last_changes
from .live_proofs import LiveProofs
from .pause_state import PauseState
from .pending import PendingRecords, ReportMissing
from .prompt_patches import PromptPatches
from .read_decoder import BULK_STEP_BYTES
from .report_router import ReportRouter
from .retention import Retention
from .running_request import RunningRequest
from .scheduled_notes import ScheduledNotes
from .shared_saves import SharedSaves
from .standing_edits import RequestEdits, StandingEdits
from .trace_end import SAVES_LOST, BlocksLost, TraceEnd
from .trace_lag import RequestPause, TraceLag
from .trace_stream import UNNUMBERED, Acknowledgements, RawAccepted, TraceStream
from .validation import Blocks
from .vector_files import VectorFiles

if TYPE_CHECKING:
    from .trace_spans import AttemptSpan, TraceSpans

__all__ = ["Attempt", "RunServices", "TraceRun"]

logger = logging.getLogger("tracewire")

#: How long the adapter tries to send a request's result to the workers, in seconds.
_GIVE_RESULT_S = 10.0
#: How many bytes a trace's store needs room for, so that large arrays go there and not to Redis.
_BULK_ROOM = 4 * BULK_STEP_BYTES
_NO_DELTAS = msgspec.Raw(msgspec.msgpack.encode([]))
_NO_VALUES = msgspec.msgpack.encode({})


@dataclass(frozen=True)
class RunServices:
    """Parts shared by all runs of an adapter. `reports` fills the records in `pending`, by the request's name."""

    engine: Engine
    info: EngineInfo
    writer: Writer
    pending: dict[str, PendingRecords]
    reports: ReportRouter
    #: Names of requests and runs, unique to the engine.
    names: Iterator[str]
    blobs: Blobs
    inputs: Inputs
    vectors: VectorFiles
    steering: Steering
    retention: Retention
    bulk: BulkWriter | None
    standing: StandingEdits
    #: Makes the traces' OpenTelemetry spans, if the adapter makes any.
    spans: TraceSpans | None = None
    #: Counts how often each limit was reached.
    limit_counts: LimitCounts = field(default_factory=LimitCounts)


@dataclass(frozen=True)
class Attempt:
    """One attempt of a trace that is to run: its validated submission, and the fields of its record."""

    submission: Submission
    #: The encoded block of each invoke, and the encoded declared interventions, if there are any.
    blocks: Blocks
    declared: bytes | None
    #: The standing interventions of each invoke, if there are any.
    edits: Sequence[RequestEdits]
    number: int
    queued_at: float
    #: Why the attempt before ended; empty for a first attempt.
    why: str
    live: LiveTrace | None
    #: Closes the record to changes of live parameters, and returns all changes that the record has accepted.
    close: Callable[[], Awaitable[list[bytes]]]
    #: The hash of each invoke's code, if an invoke has any.
    code: Sequence[str] = ()
    #: The key that has signed the submission; and the verified live parameters.
    owner: Key | None = None
    proofs: LiveProofs | None = None
    #: The attempt's OpenTelemetry span, if there is one.
    span: AttemptSpan | None = None

    #: Whether another attempt may follow this one.
    restarts: bool = False

    @property
    def tenant(self) -> str:
        """The tenant of the key that has signed the submission; empty without one."""
        return "" if self.owner is None else self.owner.tenant

    @property
    def sharing(self) -> str | None:
        """The tenant with whose other blocks this attempt's may share a process. None do if it is not the first."""
        return self.tenant if self.number == 1 else None

    @property
    def observer(self) -> Callable[[Event], None] | None:
        """Takes each event of the attempt for its span, if the span is sampled."""
        return self.span.event if self.span is not None and self.span.recording else None


class TraceRun:
    """Runs one attempt of a submission and publishes its events."""

    def __init__(self, services: RunServices, attempt: Attempt) -> None:
        submission = attempt.submission
        self._engine, self._info = services.engine, services.info
        self._pending, self._reports = services.pending, services.reports
        self._names = services.names
        self._blobs = services.blobs
        self._standing = services.standing
        tally = services.retention.tally(submission.trace, attempt.number)
        bulk = services.bulk.of_trace(submission.trace) if services.bulk is not None else None
        self._stream = TraceStream(services.writer, services.info, submission.trace, attempt.number, tally, bulk)
        self.span = attempt.span
        self._stream.observer = attempt.observer
        self._submission, self.trace = submission, submission.trace
        self._attempt = attempt
        self.owner, self.proofs = attempt.owner, attempt.proofs
        self._shared: SharedSaves | None = None
        self._patches = PromptPatches((), 0, "")
        self._reads = any(isinstance(one, Reading) for one in submission.interventions)
        self._stops = _stops(submission)
        #: Finds the strings of tokens, if the submission asks for them.
        self._strings = self._engine.token_strings if submission.token_strings else None
        self.live, self._scheduled = attempt.live, ScheduledNotes(submission.schedule)
        if self.live is not None:
            self.live.on_applied = self._applied
        #: The lease on which the trace depends; empty if it depends on none.
        self.lease = "" if submission.detach else submission.lease
        self.attempt = attempt.number
        self.requests: list[RunningRequest] = []
        self._saved_bytes = 0
        #: Whether the stream refused this attempt.
        self.fenced = False
        #: Whether the trace's record is closed to changes.
        self.closed = False
        #: The failure with which vLLM ended a request that was neither done nor aborted by the adapter.
        self._broken: Failure | None = None
        #: How the trace is to end, if `end` was called before; and whether `Accepted` was published.
        self._ending: tuple[Status, Failure] | None = None
        self._accepted = False
        self.pause = PauseState()
        self._request_pause = RequestPause(self._engine, self.requests)
        #: Slows the trace while its events wait for Redis.
        self.lag = TraceLag(self.requests, self._request_pause, submission.on_lag, self._reads, bulk)

    def _append(self, event: Event) -> Coroutine[Any, Any, None]:
        """Publish an event, and before it what is due."""
        return self._stream.append(*self._due(False), event)

    def _append_final(self, final: Final, behind: Iterable[Acknowledgements] = ()) -> Coroutine[Any, Any, None]:
        """Publish the final event, and before it what is due. See `TraceStream.end`."""
        again = partial(_revise, final, self._ending, lambda: self._ending)
        return self._stream.end(*self._due(True), final, behind=behind, again=again)

    def _queue(self, event: Event, acknowledgements: Acknowledgements) -> Coroutine[Any, Any, None]:
        """Queue an event, and before it what is due, as `TraceStream.queue` does."""
        return self._stream.queue(*self._due(False), event, acknowledgements=acknowledgements)

    def _due(self, final: bool) -> list[Event]:
        """The changes of live parameters and shared values that the stream reports before the next event."""
        due: list[Event] = []
        if self._accepted and self.live is not None:
            due += self.live.take_events(partial(_first_tokens, self.requests))
            due += self.live.last_events() if final else ()
        if self._accepted and self._shared is not None:
            due += self._shared.events()
        return due

    def _applied(self, applied: Applied) -> None:
        """Take a report that the workers have begun a step with other live parameters."""
        assert self.live is not None
        stops = self.live.stops_at(applied.version)
        for request in self.requests:
            if request.pending is not None:
                request.pending.set_stops(stops)

    @property
    def ended(self) -> bool:
        """Whether this attempt has queued a final event that Redis has not refused."""
        return self._stream.ended

    @property
    def saved_bytes(self) -> int:
        """How many bytes of saves this attempt has published, in events and beside them."""
        beside = sum(request.pending.chunk_bytes for request in self.requests if request.pending is not None)
        return self._saved_bytes + beside

    @property
    def seq(self) -> int:
        """The number of the attempt's last event, -1 before the first."""
        return self._stream.seq

    def end(self, status: Status, failure: Failure) -> bool:
        """Have the trace end as `status`. The caller then calls `abort_all`.

        Returns `False`, and changes nothing, if the trace has ended or another call has set its end.
        """
        if self._ending is not None or self.ended:
            # A final may wait behind outputs for which Redis has no memory.
            self._stream.hurry()
            return False
        self._ending = status, failure
        for request in self.requests:
            if request.pending is not None:
                request.pending.ending = True
        self._stream.hurry()
        return True

    async def apply_pause(self) -> None:
        """Pause or resume the trace's requests in the engine, by the last order of a client, and publish the change."""
        with self.pause.applying() as mine:
            # One task at a time applies orders, until the last one is applied, so that events are published in order.
            while mine and self._accepted and not self.ended and not self.fenced and self.pause.outstanding:
                self.pause.begin()
                await self._request_pause.change("client", self.pause.paused)
                if not self.ended:
                    await self._publish_notice(self.pause.event())

    async def publish_lag(self, event: Lagging) -> None:
        """Publish that the engine slows this trace, or no longer does, if the trace has not ended meanwhile."""
        if self._accepted and not self.ended and not self.fenced:
            with suppress(Fenced):
                await self._publish_notice(event)

    async def _publish_notice(self, event: Paused | Resumed | Lagging) -> None:
        try:
            await self._append(event)
        except BusFull as error:
            logger.warning("could not publish that trace %s is %s: %s", self.trace, event.type, error)
            self._stream.rewind()

    async def _close_record(self) -> None:
        """Close the trace's record to changes, and take the changes that it has accepted: the stream reports each."""
        if self.live is not None:
            self.closed = True
            await take_last_changes(self.live, self.trace, self._attempt.close)

    async def run(self) -> None:
        """Run to the end. Publishes exactly one final event, unless the stream is fenced against this attempt.

        A later attempt begins with a `Restarted`.

        Raises:
            EngineLost, BlocksLost: the engine, or the process of its blocks, died. It publishes no event for that.
        """
        lost: Exception | None = None
        refused: BusFull | EntryTooLarge | None = None
        try:
            if self.attempt > 1:
                await self._append(Restarted(**UNNUMBERED, reason=self._attempt.why or "its engine was lost"))
            try:
                if self._ending is None:
                    await self._start()
            except Rejection as rejection:
                await self.abort_all()
                await self.fail(rejection.failure, status="rejected")
                return
            if self._ending is not None:
                await self.abort_all()
                if not self._accepted:
                    status, failure = self._ending
                    await self.fail(failure, status=status)
                    return
            if len(self.requests) == 1:
                await self._pump(self.requests[0])
            else:
                async with anyio.create_task_group() as group:
                    for request in self.requests:
                        group.start_soon(self._pump, request)
            await self._conclude()
        except* Fenced:
            # Another attempt's event, or a final from another process, is on the stream, so this attempt ends silently.
            self.fenced = True
            await self.abort_all()
        except* (EngineLost, BlocksLost) as errors:
            lost = first_error(errors)
            if isinstance(lost, BlocksLost):
                await self.abort_all()
        except* (BusFull, EntryTooLarge) as errors:
            refused = first_error(errors)
        finally:
            for request in self.requests:
                self._pending.pop(request.name, None)
                await self._give_result(request)
                request.acknowledgements.close()
            self._stream.close()
            if self._shared is not None:
                await self._shared.forget(self._engine, bool(self.requests))
            await self._patches.forget(self._engine)
            if self.live is not None:
                self._reports.live.pop(self.live.run, None)
        if lost is not None:
            raise lost
        if refused is not None and not self.fenced:
            await self._end_short(refused)

    async def _end_short(self, error: BusFull | EntryTooLarge) -> None:
        """End the trace without the event that Redis has no memory for, or no entry. It always takes a short final."""
        await self.abort_all()
        if isinstance(error, BusFull):
            self._stream.rewind()
        status, failure = self._ending or ("failed", _refused(error))
        await self.fail(failure, status=status)

    async def _start(self) -> None:
        names = [next(self._names) for _ in self._submission.invokes]
        run = self.live.run if self.live is not None else names[0]
        if self.live is not None:
            self._reports.live[run] = self.live
        shared = self._begin_shared(names)
        patches = self._patches = PromptPatches(self._submission.interventions, len(names), f"{names[0]}/kept")
        prepared = []
        for index, block in enumerate(self._attempt.blocks):
            edits = self._attempt.edits[index] if self._attempt.edits else None
            declared = patches.declared(self._attempt.declared, index)
            declared = edits.declared(declared) if edits else declared
            blocks = edits.blocks if edits else None
            prepared.append(
                await self._engine.prepare(
                    self._submission, index, block, declared, run, blocks, shared=shared, tenant=self._attempt.sharing
                )
            )
        patches.check(prepared)
        for invoke, (name, block, ready) in enumerate(zip(names, self._attempt.blocks, prepared, strict=True)):
            if self._ending is not None:
                return patches.release()
            pending = None
            edits = self._attempt.edits[invoke] if self._attempt.edits else None
            if block is not None or self._attempt.declared is not None or edits:
                pending = self._pending[name] = PendingRecords(
                    ready.choices,
                    self.trace,
                    block=block is not None or (edits is not None and edits.blocks is not None),
                    reads=self._reads or (edits is not None and edits.reads),
                    stops=self._stops,
                    reports=self._reports,
                    live=self.live,
                )
                for one in pending.choices:
                    one.reads.strings = self._strings
                    one.reads.in_bulk = self._stream.bulk is not None and self._stream.bulk.has_room(_BULK_ROOM)
            try:
                outputs = await patches.start(invoke, partial(self._start_request, name, ready), self.is_over)
            except BaseException:
                self._pending.pop(name, None)
                raise
            self.requests.append(RunningRequest(name, invoke, ready, outputs, pending))
        await self._append(_accepted(self._info, self._submission, self._attempt, self.live, self.requests))
        self._accepted = True
        for steered in self.live.first_events(_first_tokens(self.requests, [])) if self.live is not None else ():
            await self._stream.append(steered)
        await self.apply_pause()

    async def _start_request(self, name: str, prepared: Prepared) -> Outputs:
        """Start a request in the engine, paused if the others of the trace are."""
        outputs = await self._engine.start(name, prepared, self._submission.priority)
        await self._request_pause.join(name)
        if self.is_over():
            await self._engine.abort(name)
        return outputs

    def is_over(self) -> bool:
        """Whether the trace is to end."""
        return self._ending is not None or self._broken is not None or self.fenced

    def _begin_shared(self, names: list[str]) -> bytes | None:
        """The shared values that go with each request, by the given names; `None` if the requests share nothing."""
        members = {
            name: n if isinstance(n := invoke.sampling.get("n"), int) else 1
            for name, block, invoke in zip(names, self._attempt.blocks, self._submission.invokes, strict=True)
            if block is not None
        }
        if self._submission.shared == _NO_VALUES or not members:
            return None
        self._shared = SharedSaves(next(self._names), self.trace, self._pending, self._reports)
        return self._shared.sent(members, self._submission.shared)

    async def _pump(self, request: RunningRequest) -> None:
        """Publish one request's outputs as they come, until the request or all its choices have ended."""
        try:
            while True:
                choices, finished = await request.outputs.get()
                if choices:
                    self._patches.note(request.invoke)
                for choice in choices:
                    if not request.done[choice.index]:
                        await self._publish(request, choice)
                if finished:
                    # `_conclude` waits for the last outputs, and for the final that it queues behind them, at once.
                    return
                if all(request.done):
                    await self._engine.abort(request.name)
                    return
                await request.acknowledgements.wait()
        except Rejection as refused:
            self._broken = self._broken or refused.failure
            await self._engine.abort(request.name)
        except ReportMissing as missing:
            if self._ending is None and not await self._engine.takes_requests():
                raise EngineLost(f"{missing}, and vLLM does not answer") from missing
            self._broken = self._broken or _own_error(self.requests)
            if self._attempt.restarts and (self._ending or self._broken) is None and _lacks_saves(request):
                raise BlocksLost(SAVES_LOST) from missing
            self._broken = self._broken or Failure(type="EngineError", message=str(missing))
            await self._engine.abort(request.name)
        finally:
            self._patches.end(request)
            await self._give_result(request)

    async def _give_result(self, request: RunningRequest) -> None:
        """Send the workers a request's output, if they wait for the output, however the trace has ended."""
        asks = request.prepared.asks_result
        if not (asks or request.prepared.tells_end) or request.given:
            return
        request.given = True
        result = request.result(self._submission.invokes[request.invoke].prompt)
        with anyio.move_on_after(_GIVE_RESULT_S, shield=True):
            try:
                await self._engine.give_result(msgspec.msgpack.encode(result))
            except EngineLost as error:
                logger.debug("the block of %s has not got its result: %s", request.name, error)

    async def _publish(self, request: RunningRequest, choice: Choice) -> None:
        """Queue the output of a choice's new tokens, when their reports have come."""
        if choice.logprobs is not None:
            # vLLM 0.25 repeats all log probabilities behind an abort.
            choice.logprobs = choice.logprobs[: len(choice.token_ids)]
        if request.pending is None and self.live is not None:
            # No task waits for reports of this request. The workers sent a change's first token before its step began.
            self._reports.pull()
        first = len(request.token_ids[choice.index])
        pending = request.pending
        steps: list[msgspec.Raw | Pieces]
        if pending is None:
            steps, sampled_at = [_NO_DELTAS] * len(choice.token_ids), time.time()
        else:
            steps = await pending.steps(choice.index, first, len(choice.token_ids))
            self._saved_bytes += encoded_size(steps)
            # Nothing is reported of a request that only edits.
            sampled_at = pending.choices[choice.index].time or time.time()
            choice, steps = request.publishable(choice, steps, self._engine.decode)
        token_ids, finish_reason = choice.token_ids, choice.finish_reason
        if finish_reason in ("abort", "error") and not request.done[choice.index] and self._ending is None:
            # vLLM aborted the request: it failed, or its processes were told to stop.
            if finish_reason == "abort" and not await self._engine.takes_requests():
                raise EngineLost("vLLM takes no more requests: its engine was told to stop")
            reason = f"vLLM ended the request with {finish_reason!r} after {first + len(token_ids)} tokens"
            self._broken = Failure(type="EngineError", message=reason)
        if finish_reason is not None:
            request.done[choice.index] = True
        if pending is not None and (reads := pending.choices[choice.index].reads).blobs:
            # The bus must have large arrays before the deltas that refer to them.
            self._saved_bytes += sum(len(raw) for _, raw in reads.blobs)
            await reads.upload(self._blobs, self.trace)
        request.take(choice)
        if not token_ids and not choice.text and finish_reason is None:
            return
        for note in self._scheduled.due(request.invoke, choice.index, first + len(token_ids), self.live):
            await self._queue(note, request.acknowledgements)
        output = request.output(choice, first, steps, self._strings, sampled_at)
        await self._queue(output, request.acknowledgements)

    async def _conclude(self) -> None:
        """Gather the finish records and publish the final."""
        pending = [(request, request.pending) for request in self.requests if request.pending is not None]
        for _, records in pending:
            with anyio.move_on_after(1 if self._broken else None):
                await records.wait_finished()
        error = self._broken or _own_error(self.requests)
        end = TraceEnd(error, lambda: self._attempt.restarts and self._ending is None)
        for request, records in pending:
            for index, choice in enumerate(records.choices):
                end.add(request.invoke, index, choice, records.choice_complete(index), len(request.token_ids[index]))
        if self._shared is not None:
            end.add_shared(await self._shared.end(self.requests))
        # Of a trace that runs again, the ends of the last attempt count.
        for invoke, finish in end.finished if self._attempt.edits else ():
            self._standing.count_end(self._attempt.edits[invoke], finish, self.trace, invoke, self._attempt.tenant)
        await self._close_record()
        end.warnings += self.lag.warnings()
        if self._ending is not None:
            # A client may have ended the trace during the waits above, and got the answer that the trace ends so.
            end.status, end.error = self._ending
        final = end.final(_usage(self.requests), self.requests)
        await self._append_final(final, [request.acknowledgements for request in self.requests])

    async def fail(self, failure: Failure, *, status: Status = "failed") -> None:
        """End the trace with an error. Events that are already published stay."""
        await self._close_record()
        final = Final(**UNNUMBERED, status=status, error=failure, usage=_usage(self.requests), time=time.time())
        try:
            await self._append_final(final)
        except Fenced:  # another process has ended the trace, or runs it now
            self.fenced = True

    async def abort_all(self) -> None:
        """End all of the trace's requests in the engine."""
        aborted = map(self._engine.abort, [request.name for request in self.requests])
        _raise_first(await asyncio.gather(*aborted, return_exceptions=True))


def _raise_first(outcomes: Iterable[object]) -> None:
    """Raise the first error among the outcomes of several calls."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


def _refused(error: BusFull | EntryTooLarge) -> Failure:
    """The failure of a trace with an event that Redis does not take, and what can be done about it."""
    hint = "submit fewer prompts in a trace, or ask for fewer prompt_logprobs, logprobs and saves"
    if isinstance(error, BusFull):
        hint = "make room on it, or keep finished traces for a shorter time"
    return Failure(type=type(error).__name__, message=f"{error}; {hint}")


def _revise(
    final: Final, before: tuple[Status, Failure] | None, ending: Callable[[], tuple[Status, Failure] | None]
) -> None:
    """Have a final that waited say how the trace is to end by now, if that was something else `before`."""
    now = ending()
    if now is not None and now is not before:
        # A client has ended the trace meanwhile, and got the answer that the trace ends so.
        final.status, final.error = now


def _lacks_saves(request: RunningRequest) -> bool:
    return request.pending is not None and any(one.lacks_saves for one in request.pending.choices)


def _own_error(requests: Sequence[RunningRequest]) -> Failure | None:
    """The error of a block, if the workers have reported any that comes again when the trace runs again."""
    choices = [choice for one in requests if one.pending is not None for choice in one.pending.choices]
    ends = [choice.finish for choice in choices if choice.finish is not None and not choice.finish.restart]
    return next((end.error for end in ends if end.error is not None), None)


def _first_tokens(requests: Sequence[RunningRequest], first: list[tuple[str, int, int]]) -> list[FirstToken]:
    """The first token of each choice under a change. `first` has (request, choice, index) of those that have begun;
    a choice that has not begun counts from token 0.
    """
    known = {(request, choice): index for request, choice, index in first}
    places = []
    for request in requests:
        for choice in range(request.prepared.choices):
            index = known.get((request.name, choice))
            if index is None and not request.token_ids[choice] and not request.done[choice]:
                index = 0
            if index is not None:
                places.append(FirstToken(invoke=request.invoke, choice=choice, index=index))
    return places


def _usage(requests: Sequence[RunningRequest]) -> Usage:
    return Usage(
        prompt_tokens=sum(request.prepared.prompt_tokens for request in requests),
        completion_tokens=sum(len(ids) for request in requests for ids in request.token_ids),
        cached_tokens=sum(request.outputs.cached_tokens for request in requests),
    )


def _stops(submission: Submission) -> list[StopWhen]:
    """The submission's stop conditions, live thresholds at their first values."""
    stops = [one for one in submission.interventions if isinstance(one, StopWhen)]
    if not stops:
        return []
    live = unpack(submission.live)
    return [one for stop in stops if isinstance(one := substitute_live(stop, live), StopWhen)]


def _accepted(
    info: EngineInfo,
    submission: Submission,
    attempt: Attempt,
    live: LiveTrace | None,
    requests: Sequence[RunningRequest],
) -> RawAccepted:
    """The event that says how the engine runs a trace."""
    strings = [request.prepared.token_strings for request in requests]
    return RawAccepted(
        **UNNUMBERED,
        engine=info.engine,
        model=info.model,
        queued_at=attempt.queued_at,
        accepted_at=time.time(),
        revision=info.revision,
        dtype=info.dtype,
        versions=info.versions,
        sampling=[request.prepared.sampling for request in requests],
        prompt_tokens=[request.prepared.prompt_tokens for request in requests],
        live_version=live.first_version if live is not None else 0,
        live=msgspec.Raw(submission.live),
        edits=[edits.versions for edits in attempt.edits],
        prompt_token_ids=[request.prepared.token_ids for request in requests],
        prompt_token_strings=[one for one in strings if one is not None],
        code=list(attempt.code),
        key="" if attempt.owner is None else attempt.owner.id,
        tenant=attempt.tenant,
        library=submission.library,
        drafts=[request.prepared.drafts for request in requests if request.prepared.drafts is not None],
    )
