"""A trace from its submission to its result, and a subscription to a trace of any client.

Both are handles: they own no task and hold no cancel scope between two calls, so that they can be entered in one task
and closed in another, as web frameworks and test fixtures do. Reading is pulled. Nothing is read ahead but the bounded
buffer of the client's one reader, and a consumer that does not read delays no other consumer.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

import anyio
import msgspec

from tracewire.checks import Duration
from tracewire.error_mapping import bus_errors, refusals
from tracewire.errors import OutputsRead, TraceClosed, TracewireError
from tracewire_bus.bus import BusUnavailable
from tracewire_bus.domain.fold import Fold
from tracewire_bus.store.trace_records import LiveState
from tracewire_bus.transport.tasks import Signal
from tracewire_bus.wire.messages import Status, Submission

from . import control
from .client_span import client_span
from .ending import Ending
from .event_reader import EventReader
from .event_stream import EventStream
from .library_names import space_of
from .model_checks import check_submission
from .output import Accepted, Event, Final, Gap, Item, Waiting
from .recorder.fan import Fan, forked
from .recorder.recording import Recording, record
from .sending import Sending, new_owner
from .state import Result, State
from .vectors import ReferredArrays, with_saved_arrays
from .whole_submission import whole_submission

if TYPE_CHECKING:
    from .presence import Overdue
    from .session import Session

__all__ = ["Trace"]

logger = logging.getLogger("tracewire")

#: How long leaving a trace waits for Redis to accept the cancellation, in seconds.
_LEAVE_S = 2.0


class Trace(EventStream[Item]):
    """One submission, and its outputs as they come.

    An async context manager: entering it submits the trace and returns once the submission is durable; leaving it stops
    reading. `start()` and `aclose()` do the same by hand, and reading an unstarted trace starts it. Leaving before the
    end was read cancels the trace for all its consumers. With `detach=True` the trace goes on to its end. So does a
    trace that another submission under the same `trace_id` has begun: this one only reads it.

    An async iterator of `Output`, `Shared`, `Steered`, `Paused`, `Resumed`, `Lagging`, `Waiting` and `Restarted`
    items, which ends with the trace. A `Gap` stands in place of events that were trimmed before they were read. Each
    item comes once: tasks that iterate at the same time share the items; a subscription yields all of them again. A
    rejected trace raises `TraceRejected` in place of its first item. A trace whose block failed raises
    `InterventionError` after its last output.
    """

    def __init__(self, session: Session, submission: Submission) -> None:
        self._session = session
        self._submission = submission
        self._trace_id = submission.trace
        self._fold = Fold(verifying=True)
        self._reader: EventReader | None = None
        self._closed = False
        #: Whether Redis may have the submission although `start` failed.
        self._unconfirmed = False
        #: Whether this submission has made the trace's record; None while that is not known.
        self._is_own: bool | None = None
        #: The watch over its deadline, while this handle may wait for its end.
        self._overdue: Overdue | None = None
        #: Set by the task that starts the trace, when it has; None while no task does.
        self._starting: anyio.Event | None = None
        #: Whether some task reads the next event; the others wait for its progress.
        self._reading = False
        self._progress = Signal()
        #: Read by `result()` or `accepted()` while an iteration is under way, and kept for it.
        self._items: deque[Item] = deque()
        self._keep_items = True
        self._iterating = False
        self._items_dropped = False
        self._accepted: Accepted | None = None
        self._final: Final | None = None
        self._ended: Ending | None = None
        self._span = client_span()
        self._owner = new_owner()

    @property
    def id(self) -> str:
        """The trace's id. Any client of the same Redis can follow the trace by it."""
        return self._submission.trace

    @property
    def model(self) -> str:
        """Name of the model that the trace runs on."""
        return self._submission.model

    @property
    def status(self) -> str | None:
        """How the trace ended, or `None` as long as this handle has not read its end."""
        return self._fold.status

    def __repr__(self) -> str:
        fold = self._fold
        if self._reader is None:
            return f"<Trace {self.id} of {self.model}: {'closed' if self._closed else 'not started'}>"
        running = "closed" if self._closed else "paused" if fold.paused else "running" if self._accepted else "queued"
        parts = [fold.status or running]
        if tokens := sum(len(choice.token_ids) for choice in fold.choices.values()):
            parts.append(f"{tokens} tokens")
        if fold.live_version:
            parts.append(f"steered to version {fold.live_version}")
        if fold.attempt > 1:
            parts.append(f"attempt {fold.attempt}")
        return f"<Trace {self.id} of {self.model}: {', '.join(parts)}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """What this handle has read, as notebooks keep it."""
        bundle = {} if self._fold.lost is not None else self.state()._repr_mimebundle_()
        return {**bundle, "text/plain": repr(self)}

    @property
    def _known_as(self) -> object:
        """The object that stands for this trace in the caller's code."""
        return self

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Submit it; durable on return. A second call does nothing.

        Raises:
            UnknownModel: no live engine serves the model.
            UnknownModulePath: the block names a module that the model does not have.
            Overloaded: too many submissions wait for the model. It can be started again.
            BusFull: Redis has too little memory left. It can be started again.
            BusUnavailable: Redis does not answer, and may have the trace. The caller can start it again, and it runs
                once. Otherwise the client cancels it when Redis answers, unless it has `detach=True`.
            BusRefused: Redis does not allow it.
        """
        while self._starting is not None:
            await self._starting.wait()
        if self._reader is not None:
            return
        if self._closed:
            raise TraceClosed(f"trace {self.id} is closed: make another one")
        starting = self._starting = anyio.Event()
        self._session.presence.do_not_cancel(self.id)
        try:
            await self._start()
        except BaseException as error:
            if self._span is not None:
                self._span.fail(error)
            if self._unconfirmed:
                self._cancel_later("its submission was not confirmed in time")
            raise
        finally:
            self._starting = None
            starting.set()
        self._unconfirmed = False

    async def _start(self) -> None:
        bus, presence, submission = self._session.open_bus(), self._session.presence, self._submission
        if self._span is not None:
            submission = msgspec.structs.replace(submission, context=self._span.begin(submission))
        if not submission.detach:
            with bus_errors():
                submission = msgspec.structs.replace(submission, lease=await presence.lease(space_of(self.id)))
        await self._session.turns.wait()
        model = await self._session.models.find(self.model)
        if self._session.referred.get(submission.interventions) is None:
            # A list that is known has all its arrays.
            submission = await with_saved_arrays(submission)
            declared, library = await self._session.library.resolve(submission.interventions, model, space_of(self.id))
            submission = msgspec.structs.replace(submission, interventions=declared, library=library)
        arrays = ReferredArrays(submission, bus.vectors, model.engines, self._session.referred)
        check_submission(msgspec.structs.replace(submission, interventions=arrays.interventions), model)
        with refusals(self.model, self.id):
            arrays.check()
            sending = Sending(bus, submission, arrays, self._owner)
            try:
                self._is_own = await sending.send(model.info.queue_limit, model.info.retention_s or None)
            except anyio.get_cancelled_exc_class():
                # Redis may have the trace, which no client would cancel later.
                if sending.asked and not submission.detach:
                    await self._cancel_as_left()
                raise
            except BusUnavailable:
                # Likewise.
                self._unconfirmed = sending.asked and not submission.detach
                raise
            # Not earlier: a second attempt sends the arrays again, which a Redis that was away may have lost.
            self._submission = sending.sent
            self._reader = EventReader(self.id, bus, "start")
            self._reader.assume_exists(new=True)
            if self._closed:
                await self._leave_running()
                raise TraceClosed(f"trace {self.id} was closed while it was submitted")
            presence.guard(sending)
            presence.recover_engines_of(submission.model)
            if submission.deadline_s is not None:
                self._overdue = presence.watch_deadline(self.id, submission.deadline_s)

    async def aclose(self) -> None:
        """Stop reading, and cancel the trace if its end was not read and it is not detached.

        Idempotent, and finishes even when cancelled.
        """
        was_closed, self._closed = self._closed, True
        self._overdue = None
        self._session.presence.unguard(self.id)
        if not was_closed and self._reader is not None:
            await self._leave_running()

    async def _leave_running(self) -> None:
        assert self._reader is not None
        with anyio.CancelScope(shield=True):
            await self._reader.aclose()
        if self._span is not None:
            self._span.end()
        if not self._submission.detach and not self._fold.finished and self._is_own:
            await self._cancel_as_left()

    async def _cancel_as_left(self) -> None:
        reason = "its submitter has left it"
        with anyio.move_on_after(_LEAVE_S, shield=True):
            try:
                if self._is_own is None and not await self._has_made_the_record():
                    return
                await control.cancel(self._session, self.id, reason)
                return
            except TracewireError as error:
                logger.debug("trace %s could not be cancelled yet: %s", self.id, error)
        # Redis is away, and the client's lease may outlast that.
        self._cancel_later(reason)

    async def _has_made_the_record(self) -> bool:
        with bus_errors():
            owner: str | None = await self._session.open_bus().records.owner(self.id)
        return owner == self._owner

    def _cancel_later(self, reason: str) -> None:
        """Have the client cancel the trace when Redis answers."""
        # An engine that makes a lost record again names no owner.
        owner = None if self._is_own else self._owner
        self._session.presence.cancel_when_back(self.id, self._session.name, reason, owner)

    # --- control ------------------------------------------------------------------------------------------------------

    async def steer(
        self,
        values: Mapping[str, Any] | None = None,
        /,
        *,
        if_version: int | None = None,
        by: str | None = None,
        **more: Any,
    ) -> int:
        """Change the trace's live parameters: see `Client.steer`."""
        return await control.steer(self._session, self.id, values, more, if_version=if_version, by=by)

    async def get_live(self) -> LiveState:
        """The trace's present live parameters: see `Client.get_live`."""
        return await control.live_state(self._session, self.id)

    async def cancel(self, reason: str = "", *, by: str | None = None) -> bool:
        """Cancel the trace: see `Client.cancel`."""
        return await control.cancel(self._session, self.id, reason, by=by)

    async def pause(
        self,
        *,
        by: str | None = None,
        timeout: Duration | None = None,
        on_timeout: Literal["resume", "cancel"] = "resume",
    ) -> bool:
        """Pause the trace: see `Client.pause`."""
        return await control.pause(self._session, self.id, by=by, end=control.pause_end(timeout, on_timeout))

    async def resume(self, *, by: str | None = None, paused_by: str | None = None) -> bool:
        """Resume the trace: see `Client.resume`."""
        return await control.resume(self._session, self.id, by=by, paused_by=paused_by)

    # --- recording and forking ----------------------------------------------------------------------------------------

    async def record(self, *, arrays: Literal["inside", "reference"] = "inside", until_now: bool = False) -> Recording:
        """Record the trace: see `Client.record`. The recording has the submission, also after the trace's end."""
        await self.start()
        submission = await whole_submission(self._submission, self.id, self._session.open_bus())
        return await record(self._session, self.id, submission=submission, arrays=arrays, until_now=until_now)

    async def fork(
        self,
        live: Sequence[Mapping[str, Any]],
        *,
        at: int | None = None,
        invoke: int = 0,
        choice: int = 0,
        logprobs: int | None = None,
    ) -> Fan:
        """Fork the trace at the token `at`: see `Client.fork`. It may run, or have ended."""
        recording = await self.record(until_now=True)
        make, name = partial(Trace, self._session), self._session.name
        return forked(make, name, recording, live, at=at, invoke=invoke, choice=choice, logprobs=logprobs)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _keep_no_contents(self) -> None:
        """Keep no tokens, text and saves: `state`, `result` and the results of errors have none.

        For a caller that passes the items on, as the gateway does. The caller calls it before it reads the trace.
        """
        self._fold = Fold(contents=False)

    async def accepted(self) -> Accepted:
        """Wait until an engine has accepted the trace, and return its `Accepted` event.

        Raises:
            TraceRejected: the engine refused the trace; `field` names the part at fault.
            TraceFailed: the trace ended before any engine accepted it.
        """
        await self._read_until(lambda: self._accepted is not None or self._fold.finished)
        if self._accepted is None or self._fold.status == "rejected":
            self._ending().raise_failure()
        assert self._accepted is not None
        return self._accepted

    async def final(self) -> Final:
        """Read to the end; return its `Final` event, whatever its status. It can be called whenever `result` can."""
        await self._read_to_end()
        assert self._final is not None
        return self._final

    def __aiter__(self) -> Self:
        if self._items_dropped:
            raise OutputsRead(
                f"result() has read the outputs of trace {self.id}: iterate before or beside it, "
                f"or read them again with client.subscribe({self.id!r})"
            )
        self._iterating = True
        return self

    @property
    def _ready(self) -> bool:
        """Whether the next item is here."""
        return bool(self._items) or (self._reader is not None and self._reader.ready)

    async def __anext__(self) -> Item:
        self._iterating = True
        await self._read_until(lambda: bool(self._items) or self._fold.finished)
        if self._items:
            return self._items.popleft()
        self._ending().raise_failure()
        raise StopAsyncIteration

    def state(self) -> State:
        """The folded state of the events that this handle has read. Copies all containers; arrays are shared.

        Raises:
            ValueMissing: saves among them are in a bulk store that cannot be read.
        """
        return State(self.id, self._fold)

    async def result(self) -> Result:
        """Read to the end; return the output and the saves, compared with the engine's digests.

        It can be called at any time: alone, beside an iteration (which still gets every output) or after it, also by
        several tasks.

        Raises:
            TraceRejected: the trace never ran; `field` says why.
            InterventionError: its block raised; `result` has the output and saves until then.
            TraceFailed: its engine could not go on, or it was cancelled or expired; `result` likewise.
            StateMismatch: the saves differ from those that the engine collected.
            ValueMissing: saves are in a bulk store that cannot be read.
        """
        await self._read_to_end()
        ending = self._ending()
        ending.raise_failure()
        return ending.verified()

    async def until_done(self) -> Status:
        """Read to the end; return how the trace ended: `"finished"`, `"stopped"`, `"cancelled"`, `"expired"`,
        `"rejected"` or `"failed"`. It can be called whenever `result` can.
        """
        await self._read_to_end()
        assert self._fold.status is not None
        return self._fold.status

    async def _read_to_end(self) -> None:
        if not self._iterating and not self._fold.finished:
            # No caller will read these items: keep the state only.
            self._keep_items = False
        await self._read_until(lambda: self._fold.finished)

    def _ending(self) -> Ending:
        """Its end, which was read, built and compared once."""
        if self._ended is None:
            self._ended = Ending(self.id, self._fold)
        return self._ended

    async def _read_until(self, done: Callable[[], bool]) -> None:
        """Read and fold events until `done`. Several tasks may wait: one of them reads, one event a turn, for all."""
        while not done():
            if self._reading:
                await self._progress.wait()
                continue
            self._reading = True
            try:
                if self._reader is None:
                    await self.start()
                    assert self._reader is not None
                event = await self._reader.next(self._fold)
                if event is None:
                    fate = "it goes on" if self._submission.detach else "it was cancelled then"
                    raise TraceClosed(
                        f"trace {self.id} was closed before its end was read: {fate}, and "
                        f"client.subscribe({self.id!r}) or client.get_state({self.id!r}) reads it"
                    )
                self._handle(event)
            finally:
                # Also when this task was cancelled: another one reads on.
                self._reading = False
                self._progress.notify()

    def _handle(self, event: Event) -> None:
        if self._accepted is None and not isinstance(event, Waiting):
            # An engine has it.
            self._session.presence.unguard(self.id)
        if self._span is not None:
            self._span.event(event, self._fold)
        if isinstance(event, Accepted):
            self._accepted = event
        elif isinstance(event, Final):
            self._final, self._overdue = event, None
        else:
            if isinstance(event, Gap):
                self._accepted = self._fold.accepted or self._accepted
            if self._iterating or self._keep_items:
                self._items.append(event)
            else:
                self._items.clear()
                self._items_dropped = True
