"""Orders of clients for running traces: cancel, pause, resume, and changes of live parameters."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from weakref import WeakKeyDictionary

import anyio

from tracewire_bus.bus import Bus, BusError, Fenced
from tracewire_bus.domain.identity import Key, SignatureRefused
from tracewire_bus.store.control import Order
from tracewire_bus.store.trace_records import TraceEnded, TraceMissing, cancellation
from tracewire_bus.transport.tasks import Signal
from tracewire_bus.wire.messages import EngineInfo, Failure, Status
from tracewire_bus.wire.signing import decode_envelope

from .audit import Audit
from .claims import Claims
from .engine_api import EngineLost
from .gate import Gate
from .lifecycle import Lifecycle
from .live_changes import LiveTrace, Steering
from .trace_run import TraceRun

__all__ = ["Control"]

logger = logging.getLogger("tracewire")

#: How long one wait for orders lasts, in milliseconds.
_CONTROL_MS = 2000


class Control:
    """Carries out orders for the runs of one engine, and ends runs before their own end."""

    def __init__(
        self,
        bus: Bus,
        info: EngineInfo,
        claims: Claims,
        steering: Steering,
        lifecycle: Lifecycle,
        gate: Gate,
        audit: Audit,
    ) -> None:
        self._bus = bus
        self.audit = audit
        self.gate = gate
        self._info = info
        self._claims = claims
        self._steering = steering
        self._lifecycle = lifecycle
        self._to_abort: deque[TraceRun] = deque()
        self._aborting = 0
        self._to_pause: deque[TraceRun] = deque()
        self._wanted = Signal()
        #: The nonces of signed orders for each run, with the number of the pause or resumption.
        self._orders: WeakKeyDictionary[TraceRun, dict[bytes, int]] = WeakKeyDictionary()
        #: How the records of traces are to be mended, with the traces' ids.
        self._to_mend: deque[tuple[str, Callable[[], Awaitable[None]]]] = deque()
        self._mending = Signal()

    @property
    def busy(self) -> bool:
        """Whether the engine still has requests of a run that must end early."""
        return bool(self._to_abort or self._aborting)

    async def read(self) -> None:
        """Read the orders of clients and carry them out. Never ends by itself."""
        reader = self._bus.control(self._info.engine)
        try:
            while True:
                try:
                    orders = await reader.read(_CONTROL_MS)
                except BusError as error:
                    logger.error("the orders of clients cannot be read: %s", error)
                    await anyio.sleep(_CONTROL_MS / 1000)
                    continue
                for order in orders:
                    if order.kind == "drain":
                        if self._is_allowed(order, None):
                            self._lifecycle.drain(order.within_s)
                        continue
                    if order.kind == "cancel" and order.trace not in self._claims.runs:
                        await self._cancel(order)
                    self.obey(order)
        finally:
            with anyio.CancelScope(shield=True):
                await reader.aclose()

    async def _cancel(self, order: Order) -> None:
        """Cancel a trace that this engine does not run. It may wait in the queue or run on another engine."""
        try:
            if self.gate.strict:
                owner = self.gate.key(await self._bus.records.submitter(order.trace))
                if not self._is_allowed(order, owner):
                    return
            _, model = await self._bus.records.cancel(order.trace, by=order.by, reason=order.reason, force=True)
            await self._bus.queue.withdraw(model, order.trace)
        except (TraceEnded, TraceMissing):
            return
        except BusError as error:
            logger.warning("trace %s could not be cancelled: %s", order.trace, error)

    def note_pause(self, run: TraceRun, proof: bytes, number: int) -> None:
        """Note the signed pause that a run has begun with, so that nobody can repeat it."""
        if proof:
            self._is_new(run, proof, number)

    def _is_new(self, run: TraceRun, proof: bytes, number: int) -> bool:
        """Whether a proof that was verified comes to this run for the first time, or as the same pause again."""
        nonce = decode_envelope(proof).nonce
        return self._orders.setdefault(run, {}).setdefault(nonce, number) == number

    def _is_allowed(self, order: Order, owner: Key | None, run: TraceRun | None = None) -> bool:
        """Whether an order may be carried out for a trace of `owner`, and for its run if it has one. Logs a refusal."""
        name = order.trace or self._info.engine
        try:
            key = self.gate.order(order, owner)
            if key is not None and run is not None and not self._is_new(run, order.proof, order.number):
                raise SignatureRefused(f"the order of key {key.id!r} was replayed")
        except SignatureRefused as error:
            logger.warning("an order to %s %s is refused: %s", order.kind, order.trace or "this engine", error)
            self.audit.refused(order.kind, name, str(error), by=order.by)
            return False
        self.audit.accepted(order.kind, name, key, by=order.by)
        return True

    def _is_admitted(self, order: Order, run: TraceRun) -> bool:
        """Whether an order for a trace that runs here may be carried out. A refused change is undone."""
        if order.kind != "steer":
            return self._is_allowed(order, run.owner, run)
        if run.proofs is None:
            return True
        try:
            self.audit.accepted("steer", order.trace, run.proofs.admit(order.change))
        except SignatureRefused as error:
            logger.warning("a change of live parameters of trace %s is refused: %s", order.trace, error)
            self.audit.refused("steer", order.trace, str(error))
            undoing = run.proofs.undo(order.change)
            if undoing is not None:
                self._mend(order.trace, partial(self._bus.records.restore, order.trace, *undoing))
            return False
        return True

    def _mend(self, trace: str, mend: Callable[[], Awaitable[None]]) -> None:
        self._to_mend.append((trace, mend))
        self._mending.notify()

    async def mend(self) -> None:
        """Mend the traces' records. Never ends by itself.

        It undoes the changes that the engine has refused. It tells a record what the engine has accepted under another
        number than the record has given.
        """
        while True:
            while not self._to_mend:
                await self._mending.wait()
            trace, mend = self._to_mend.popleft()
            try:
                await mend()
            except BusError as error:
                # The next engine of the trace refuses a change again, and this one tells a new server all it knows.
                logger.warning("the record of trace %s could not be mended: %s", trace, error)

    def obey(self, order: Order) -> None:
        """Carry out an order for a trace, if the trace runs here and the order is accepted."""
        run = self._claims.runs.get(order.trace)
        if isinstance(run, list):
            run.append(order)
        elif run is None or run.pause.is_known(order.id) or not self._is_admitted(order, run):
            # The trace has ended, or the order was read before, or nobody may do this.
            return
        elif order.kind in ("pause", "resume"):
            self._pause(run, order)
        elif order.kind == "cancel":
            self.end(run, "cancelled", cancellation(order.by, order.reason))
        elif run.live is not None:
            self._steer(run, run.live, order.change)

    def _steer(self, run: TraceRun, live: LiveTrace, change: bytes) -> None:
        key = self._bus.keys.record(run.trace)
        values = self._bus.guard.read(live.take, change, key=key, entry="a change of live parameters")
        if values:
            self._steering.send(live, values)
        if live.renumbered:
            live.renumbered = False
            self._mend(run.trace, partial(self._claims.tell_record, run))

    def _pause(self, run: TraceRun, order: Order) -> None:
        if run.pause.request(
            order.by,
            resume=order.kind == "resume",
            number=order.number,
            within_s=order.within_s,
            then=order.then,
            id=order.id,
        ):
            self._mend(run.trace, partial(self._claims.tell_record, run))
        self.apply_pause(run)

    def apply_pause(self, run: TraceRun) -> None:
        """Have a run pause or go on, as was asked for last."""
        self._to_pause.append(run)
        self._wanted.notify()

    def end(self, run: TraceRun, status: Status, failure: Failure) -> bool:
        """End a run early, as `status` with `failure`. Returns `False` if the run has ended or was to end already."""
        news = run.end(status, failure)
        if news:
            self._to_abort.append(run)
            self._wanted.notify()
        return news

    async def run(self) -> None:
        """Abort the requests of runs that must end early, and pause and resume runs. Never ends by itself."""
        # Each in a task of its own: publishing a pause waits for Redis, and an abort must not wait for that.
        async with anyio.create_task_group() as settling:
            while True:
                while not self._to_abort and not self._to_pause:
                    await self._wanted.wait()
                if not self._to_abort:
                    settling.start_soon(self._apply_pause, self._to_pause.popleft())
                    continue
                self._aborting += 1
                settling.start_soon(self._abort, self._to_abort.popleft())

    async def _abort(self, run: TraceRun) -> None:
        try:
            await run.abort_all()
        except Exception:
            logger.exception("the requests of a trace that must end could not be aborted")
        finally:
            self._aborting -= 1

    async def _apply_pause(self, run: TraceRun) -> None:
        try:
            await run.apply_pause()
        except (Fenced, EngineLost) as error:
            # The trace's run gets the same error by itself.
            logger.debug("a trace was neither paused nor resumed: %s", error)
        except Exception:  # an error of one trace must not stop the others
            logger.exception("a trace could not be paused or resumed")
