"""Takes submissions from the model's queue, has each checked, and runs it to its final event."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import anyio
import anyio.abc
import msgspec
from msgspec import structs

from tracewire_bus.bus import Bus, BusError, BusUnavailable, Fenced, Taken
from tracewire_bus.domain.identity import Key, SignatureRefused
from tracewire_bus.domain.limits import LimitExceeded, check_tries
from tracewire_bus.log_fields import add_log_fields
from tracewire_bus.store.control import Order
from tracewire_bus.store.proofs import cancel_content, pause_content
from tracewire_bus.store.trace_records import (
    Opened,
    Overtaken,
    Replayed,
    TraceElsewhere,
    TraceEnded,
    TraceOfAnother,
    cancellation,
)
from tracewire_bus.transport.backoff import Backoff
from tracewire_bus.transport.errors import first_error
from tracewire_bus.transport.guard import Malformed
from tracewire_bus.wire.codec import NewerSchema
from tracewire_bus.wire.live_values import unpack_live
from tracewire_bus.wire.messages import Failure, Status, StopWhen, Submission

from .admissions import Admissions, ClientFull, Seat, TenantFull
from .claims import Claims
from .control import Control
from .engine_api import EngineLost, Rejection
from .gate import Admitted, Gate, refused
from .http_requests import PlainRequests
from .lifecycle import Lifecycle
from .live_changes import LiveTrace
from .live_proofs import LiveProofs
from .refusals import Refusals
from .settings import Settings
from .standing_edits import RequestEdits
from .trace_end import BlocksLost
from .trace_run import Attempt, RunServices, TraceRun
from .validation import Validated, Validator, refusal

__all__ = ["Intake"]

logger = logging.getLogger("tracewire")

#: How long to wait before a command that Redis refused is sent again, in seconds: at first, and at most.
_REFUSED_S, _REFUSED_MOST_S = 0.2, 5.0
#: How long an entry that has no place here stays before other engines can take it, in seconds.
_FULL_S: float = 1.0
_NO_LIVE = msgspec.msgpack.encode({})


class Intake:
    """Takes submissions for one engine, up to its capacity. Requests of `plain` count towards the capacity too."""

    def __init__(
        self,
        bus: Bus,
        services: RunServices,
        validator: Validator,
        claims: Claims,
        control: Control,
        plain: PlainRequests,
        lifecycle: Lifecycle,
        settings: Settings,
    ) -> None:
        self._bus = bus
        self._gate = control.gate
        self._admissions = Admissions(control.gate, settings.limits.client_traces)
        self._services = services
        self._engine = services.engine
        self._info = services.info
        self._validator = validator
        self._claims = claims
        self._control = control
        self._plain = plain
        self._lifecycle = lifecycle
        self._settings = settings
        self.refusals = Refusals(bus, services, claims)
        #: The cancel scopes of the queue entries that are being served.
        self.scopes: set[anyio.CancelScope] = set()
        #: The waits after Redis has refused to give an entry, or to begin one.
        self.refused = Backoff(_REFUSED_S, _REFUSED_MOST_S)

    async def take(self, traces: anyio.abc.TaskGroup) -> None:
        """Take submissions while the adapter serves, and run each as a task of `traces`."""
        while not self._lifecycle.stopping.is_set():
            room = self._info.capacity - len(self.scopes) - self._plain.running
            valid_s = self._lifecycle.valid_until - anyio.current_time()
            if room <= 0 or valid_s <= 0 or self._lifecycle.engine_paused:
                await self._lifecycle.changed()
                continue
            wait_ms = int(min(self._settings.poll_s, valid_s) * 1000)
            try:
                taken = await self._bus.queue.take(self._info.model, self._info.engine, min(room, 64), wait_ms, room)
            except BusError as error:
                # Running traces go on. The operator can mend the cause meanwhile.
                logger.error("could not take submissions from the queue: %s", error)
                await self._back_off()
                continue
            for entry in taken:
                scope = anyio.CancelScope()
                self.scopes.add(scope)
                traces.start_soon(self._serve, entry, scope)

    async def _back_off(self) -> None:
        """Wait before a refused command is sent to Redis again. Returns early if the adapter is told to stop."""
        await self._rest(self.refused.next())

    async def _rest(self, seconds: float) -> None:
        """Wait so long, or until the adapter is told to stop."""
        with anyio.move_on_after(seconds):
            await self._lifecycle.stopping.wait()

    async def drain(self) -> None:
        """Let running traces finish until the time given for that is over, then end them."""
        while (
            (self.scopes or self._plain.busy)
            and not self._lifecycle.lost
            and (left_s := self._lifecycle.until - anyio.current_time()) > 0
        ):
            with anyio.move_on_after(left_s):
                await self._lifecycle.changed()
        for scope in self.scopes:
            scope.cancel()

    async def _serve(self, entry: Taken, scope: anyio.CancelScope) -> None:
        """Run one queue entry to its final event. Raises nothing, so that one entry cannot stop the others."""
        checked: tuple[Admitted, Validated, list[RequestEdits]] | None = None
        try:
            with self._admissions.seat() as seat:
                checked = await self._checked(entry, seat)
                if checked is not None:
                    await self._run_trace(entry, scope, *checked)
                    self._see_that_it_is_settled(entry)
                    # Not after an error: then the entry comes again, as the same attempt.
                    self._admissions.end(checked[0])
        except Malformed as error:
            # The trace's record is malformed, so another try would fail too.
            failure = Failure(type="TraceRejected", message=str(error))
            await self._fail(entry, failure, None if checked is None else checked[0])
        except BusError as error:
            # The entry is still held by this engine and comes again, after a pause: Redis may give the same answer.
            logger.warning("queue entry %s could not be served: %s", entry.trace, error)
            await self._back_off()
            self._bus.queue.redeliver(self._info.model, self._info.engine, entry.trace)
        except Exception as error:  # a defect of the adapter must not stop the other entries
            logger.exception("queue entry %s could not be served", entry.trace)
            failure = Failure(type=type(error).__name__, message=f"the adapter failed: {error}")
            await self._fail(entry, failure, None if checked is None else checked[0])
        finally:
            self.scopes.discard(scope)
            self._lifecycle.notify()

    def _see_that_it_is_settled(self, entry: Taken) -> None:
        """Check that an entry that was served is held no more. A leaving engine puts back those that it holds.

        Raises:
            BusError: it is held.
        """
        leaves = self._lifecycle.stopping.is_set() or self._lifecycle.lost
        if not leaves and self._bus.queue.holds(self._info.model, self._info.engine, entry.trace):
            raise BusError("its trace has neither ended nor been put back")

    async def _fail(self, entry: Taken, failure: Failure, admitted: Admitted | None) -> None:
        """End a trace that could not be begun."""
        try:
            await self._bus.records.end(entry.trace, "failed", failure)
            await self._bus.queue.done(self._info.model, entry.trace, self._info.engine, entry.attempt)
            if admitted is not None:
                self._admissions.end(admitted)
        except BusError as error:
            # The entry is delivered again, and answered then.
            logger.warning("queue entry %s could not be answered either: %s", entry.trace, error)
            await self._back_off()
            self._bus.queue.redeliver(self._info.model, self._info.engine, entry.trace)

    async def _checked(self, entry: Taken, seat: Seat) -> tuple[Admitted, Validated, list[RequestEdits]] | None:
        """Verify, decode and check an entry, and choose the standing interventions of each invoke, if there are any.

        Returns `None` for an entry that cannot run, which is answered or becomes a dead letter; or that has no place
        here and has run before, which waits for a place here or elsewhere.
        """
        trace = entry.fields.get(b"t", b"").decode("utf-8", "replace")
        schema = entry.fields.get(b"v", b"").decode("ascii", "replace")
        admitted: Admitted | None = None
        try:
            admitted = await self._admissions.admit(trace, entry)
            while self._claims.runs_of(trace, admitted.key):
                # Another engine took the trace while this one ran it, and the trace came back. It has its seat here.
                await self._lifecycle.changed()
            self._admissions.admit_tenant(admitted.key, seat)
            check_tries(entry.tries, self._settings.limits)
            validated = await self._validator.validate(trace, schema, admitted.content, admitted.key)
            self._admissions.admit_client(validated.submission.client, seat)
            return admitted, validated, self._choose(validated.submission)
        except (Rejection, LimitExceeded, NewerSchema) as error:
            if isinstance(error, (TenantFull, ClientFull)) and await self._ran_before(entry, trace):
                seat.leave()
                await self._rest(_FULL_S)
                await self._hand_over(entry, refusal(error).message)
                return None
            self._control.audit.refused("submit", trace, refusal(error).message)
            self._services.limit_counts.note(error)
            failure = refusal(error)
            if self._services.spans is not None and isinstance(error, Rejection):
                self._services.spans.refuse(entry, failure, self._info.engine)
        except ValueError as error:
            self._bus.guard.note(self._bus.keys.queue(self._info.model, "data"), entry.trace, error)
            failure = refusal(error)
        await self.refusals.refuse(entry, trace, failure, admitted)
        return None

    async def _ran_before(self, entry: Taken, trace: str) -> bool:
        """Whether an engine has taken an entry before, or has begun its trace."""
        if entry.attempt > 1:
            return True
        holder = await self._bus.records.holder(trace)
        return holder is not None and bool(holder[1])

    def _note(self, validated: Validated, key: Key | None) -> None:
        """Write an accepted submission and its code to the audit trail."""
        submission, audit = validated.submission, self._control.audit
        code = sorted({one for one in validated.code if one})
        audit.accepted("submit", submission.trace, key, code=code, by=submission.client)

    def _choose(self, submission: Submission) -> list[RequestEdits]:
        """The standing interventions of each invoke; an empty list if no invoke has any.

        Raises:
            Rejection: the submission asks for an edit that does not run here.
        """
        several = len(submission.invokes) > 1
        chosen = [
            self._services.standing.choose(submission.edits if invoke.edits is None else invoke.edits, field)
            for invoke, field in (
                (invoke, f"invokes[{index}].edits" if several and invoke.edits is not None else "edits")
                for index, invoke in enumerate(submission.invokes)
            )
        ]
        return chosen if any(chosen) else []

    async def _run_trace(
        self,
        entry: Taken,
        scope: anyio.CancelScope,
        admitted: Admitted,
        validated: Validated,
        edits: list[RequestEdits],
    ) -> None:
        submission = validated.submission
        trace = submission.trace
        while trace in self._claims.runs:
            await self._lifecycle.changed()
        early: list[Order] = []
        self._claims.runs[trace] = early
        try:
            try:
                opened = await self._opened(trace, entry.attempt, admitted)
            except (Replayed, TraceElsewhere, TraceOfAnother) as error:
                failure = refused(str(error)).failure
                self._control.audit.refused("submit", trace, failure.message, admitted.key)
                await self.refusals.refuse(entry, trace, failure, admitted)
                return
            except TraceEnded:
                # The trace was cancelled, or expired, before an engine took it; or its engine was lost after its end.
                await self._bus.queue.done(self._info.model, entry.trace, self._info.engine, entry.attempt)
                return
            except Overtaken:
                self.refused.reset()
                # This engine was slow, and another one has taken the trace. Or Redis has forgotten how often the trace
                # was taken, as after a failover; the number of a later attempt may then be high enough.
                await self._hand_over(entry, "another engine has begun it")
                return
            self._note(validated, admitted.key)
            opened = self._bounded(entry, opened)
            run = self._run_of(entry, admitted, validated, edits, opened)
            due = None if opened.left_s is None else anyio.current_time() + opened.left_s
            self._claims.entries[trace] = entry, submission, due
            self._claims.runs[trace] = run
            for order in early:
                self._control.obey(order)
            try:
                await self._run_to_its_end(entry, scope, submission, run, opened)
            finally:
                if run.live is not None:
                    self._services.steering.over(run.live)
                if run.span is not None:
                    run.span.end(self._fate(run))
        finally:
            del self._claims.runs[trace]
            self._claims.entries.pop(trace, None)
            self._services.writer.forget(trace)

    async def _opened(self, trace: str, attempt: int, admitted: Admitted) -> Opened:
        """Claim the trace for this engine."""
        mark, model, limits = self._admissions.mark(admitted), self._info.model, self._settings.limits
        return await self._bus.records.open(trace, self._info.engine, attempt, limits, model=model, mark=mark)

    def _bounded(self, entry: Taken, opened: Opened) -> Opened:
        """The record with a deadline that is no later than the engine's limit allows."""
        most = self._settings.limits.deadline_s
        if not most:
            return opened
        left_s = max(0.0, most - max(0.0, opened.now - entry.queued_at))
        return (
            opened if opened.left_s is not None and opened.left_s <= left_s else structs.replace(opened, left_s=left_s)
        )

    def _fate(self, run: TraceRun) -> str:
        """The type of the error by which an attempt has ended without a final of its own; empty if it has one."""
        if run.fenced:
            return "Fenced"
        if run.ended:
            return ""
        return "EngineLost" if self._lifecycle.lost else "EngineShutdown"

    def _proofs(self, submission: Submission, owner: Key | None) -> LiveProofs | None:
        """Verifies the live parameters of a trace; None if it has none."""
        if submission.live == _NO_LIVE:
            return None
        return LiveProofs(self._gate, submission.trace, owner, submission.live)

    def _run_of(
        self, entry: Taken, admitted: Admitted, validated: Validated, edits: list[RequestEdits], opened: Opened
    ) -> TraceRun:
        submission, owner = validated.submission, admitted.key
        proofs = self._proofs(submission, owner)
        opened = _proven(opened, self._gate, submission.trace, owner, proofs)
        span = None
        if self._services.spans is not None:
            span = self._services.spans.begin(entry, submission, opened.attempt, self._info.engine)
            # vLLM's own spans stand below it.
            submission = structs.replace(submission, context=span.context)
        live: LiveTrace | None = None
        if submission.live != _NO_LIVE:
            if opened.version:
                key = self._bus.keys.record(submission.trace)
                self._bus.guard.demand(_check_same, submission.live, opened.live, key=key, entry="live parameters")
                submission = structs.replace(submission, live=opened.live)
            stops = [one for one in submission.interventions if isinstance(one, StopWhen)]
            live = LiveTrace(next(self._services.names), submission.live, opened.version, opened.changes, stops)
        attempt = Attempt(
            submission,
            validated.blocks,
            validated.declared,
            edits,
            number=opened.attempt,
            queued_at=entry.queued_at,
            why=entry.why,
            live=live,
            close=partial(self._close, submission.trace, opened.attempt, proofs),
            owner=owner,
            proofs=proofs,
            code=validated.code,
            span=span,
            restarts=entry.tries > 1,
        )
        run = TraceRun(self._services, attempt)
        if opened.cancelled is not None:
            run.end("cancelled", cancellation(*opened.cancelled))
        run.pause.number = opened.pauses
        if opened.paused is not None:
            run.pause.request(opened.paused, within_s=opened.pause_left_s, then=opened.pause_then)
            self._control.note_pause(run, opened.pause_proof, opened.pauses)
        return run

    def _deadline_failure(self, submission: Submission) -> Failure:
        own, most = submission.deadline_s, self._settings.limits.deadline_s
        if most and (own is None or own > most):
            message = f"this engine ends a trace {most} s after it was queued (--limit deadline-s)"
        else:
            message = f"the trace's deadline, {own or 0:g} s after it was queued, has passed"
        return Failure(type="DeadlineExceeded", message=message, field="deadline")

    async def _close(self, trace: str, attempt: int, proofs: LiveProofs | None) -> list[bytes]:
        """Close a trace's record to changes. Returns those that it has accepted, and that this engine accepts."""
        changes = await self._bus.records.close(trace, attempt)
        return changes if proofs is None else proofs.admitted(changes)

    async def _run_to_its_end(
        self, entry: Taken, scope: anyio.CancelScope, submission: Submission, run: TraceRun, opened: Opened
    ) -> None:
        add_log_fields(trace_id=entry.trace, client=submission.client, engine=self._services.info.engine)
        if run.span is not None:
            add_log_fields(**run.span.log_fields)
        timer: asyncio.TimerHandle | None = None
        if opened.left_s is not None:
            failure = self._deadline_failure(submission)
            if opened.left_s <= 0:
                run.end("expired", failure)
            else:
                timer = asyncio.get_running_loop().call_later(opened.left_s, self._control.end, run, "expired", failure)
        problem: Failure | None = None
        handed_over = False
        status: Status = "failed"
        model, engine = self._info.model, self._info.engine
        try:
            with scope:
                async with _needs(self._services, submission, run, self.refused):
                    await run.run()
        except (Rejection, LimitExceeded) as error:
            self._services.limit_counts.note(error)
            status, problem = "rejected", refusal(error)
        except EngineLost as error:
            if self._lifecycle.stopping.is_set() and not self._engine.lost:
                # All processes of this engine were told to stop at once. Another engine continues the trace.
                logger.info("trace %s is handed over to another engine: %s", submission.trace, error)
                handed_over = True
            else:
                logger.error("engine %s is lost: %s", engine, error)
                self._lifecycle.give_up()
        except BlocksLost as error:
            logger.info("trace %s runs again: %s", submission.trace, error)
            await self._put_back(entry, str(error))
        except Exception as error:
            if _is_no_failure(error, run):
                raise
            logger.exception("trace %s failed in the adapter", submission.trace)
            cause = first_error(error)  # with several invokes it may come in an exception group
            problem = Failure(type=type(cause).__name__, message=f"the adapter failed: {cause}")
        finally:
            if timer is not None:
                timer.cancel()
        if (scope.cancelled_caught or handed_over) and not self._lifecycle.lost and entry.tries <= 1:
            # A trace with more tries is put back when this engine has left, and waits for another one.
            problem = Failure(type="EngineShutdown", message=f"engine {engine} was shut down while it ran this trace")
        if problem is not None and not run.ended:
            # A Redis that does not answer must not keep a stopping engine from exiting.
            with anyio.move_on_after(
                self._settings.last_words_s if self._lifecycle.stopping.is_set() else None, shield=True
            ):
                await run.abort_all()
                await run.fail(problem, status=status)
        if run.fenced:
            if await self._bus.records.ended(submission.trace):
                await self._bus.queue.done(model, entry.trace, engine, entry.attempt)
            else:
                # Another engine has taken the trace by now, or will take it next.
                await self._put_back(entry, "another engine wrote to its stream")

    async def _put_back(self, entry: Taken, why: str) -> None:
        """Let the trace of an entry run again. It loses one of its tries."""
        await self._bus.records.leave(entry.trace, self._info.engine, entry.attempt)
        await self._hand_over(entry, why, lost=True)

    async def _hand_over(self, entry: Taken, why: str, *, lost: bool = False) -> None:
        """Put an entry back at its place in the queue. If it was `lost` here, it loses one of its tries."""
        model, engine = self._info.model, self._info.engine
        await self._bus.queue.put_back(model, engine, why, lost=lost, trace=entry.trace, attempt=entry.attempt)
        self._bus.queue.note_settled(model, entry.trace)


@asynccontextmanager
async def _needs(services: RunServices, submission: Submission, run: TraceRun, refused: Backoff) -> AsyncIterator[None]:
    """Have the inputs and vectors of a trace here. A trace that is to end needs none.

    Resets `refused` once they are.

    Raises:
        BusError: Redis refuses, or does not answer.
    """
    async with AsyncExitStack() as fetched:
        try:
            if not run.is_over():
                await fetched.enter_async_context(services.inputs.of(submission))
                await fetched.enter_async_context(services.vectors.of(submission.interventions))
        except BusError:
            if not run.is_over():
                raise
        refused.reset()
        yield


def _proven(opened: Opened, gate: Gate, trace: str, owner: Key | None, proofs: LiveProofs | None) -> Opened:
    """A trace's record without what a strict gate does not accept: changes, a cancellation, a pause."""
    if not gate.strict:
        return opened
    if proofs is not None:
        opened = proofs.begin(opened)
    cancelled, paused = opened.cancelled, opened.paused
    try:
        if cancelled is not None:
            gate.proof("cancel", trace, opened.cancel_proof, cancel_content(*cancelled), owner, timely=False)
    except SignatureRefused as error:
        logger.warning("the cancellation of trace %s is refused: %s", trace, error)
        cancelled = None
    try:
        if paused is not None:
            content = pause_content(paused, opened.pause_within_s, opened.pause_then)
            gate.proof("pause", trace, opened.pause_proof, content, owner, timely=False)
    except SignatureRefused as error:
        logger.warning("the pause of trace %s is refused: %s", trace, error)
        paused = None
    return msgspec.structs.replace(opened, cancelled=cancelled, paused=paused)


def _check_same(declared: bytes, now: bytes) -> None:
    """Check that live parameters have the names and forms with which they were declared.

    Raises:
        ValueError: they have not.
    """
    forms = [{name: value.form for name, value in unpack_live(packed).items()} for packed in (declared, now)]
    if forms[0] != forms[1]:
        raise ValueError(f"they were declared as {forms[0]}, and are {forms[1]}"[:1000])


def _is_no_failure(error: Exception, run: TraceRun) -> bool:
    """Whether an error says nothing of the trace: another engine has it, or Redis was away before the run began.

    The entry of a run that had not begun comes again, as the same attempt.
    """
    return isinstance(error, Fenced) or (isinstance(error, BusUnavailable) and run.seq < 0 and not run.ended)
