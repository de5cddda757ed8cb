"""The adapter: one task group that takes submissions, runs each as a trace, and registers its engine on the bus.

`Intake` takes submissions off the model's queue, up to the engine's capacity, has a `Validator` check each, and runs it
as a task (`trace_run.py`), which gets the workers' reports by `report_router.py`. The *blob reader* brings large arrays
to the bus before the reports that refer to them. `Control` reads clients' orders for running traces; `Steering` brings
changes of live parameters to the workers. After Redis has lost data, `Claims` writes again which traces run here.
`LeaseWatch` ends the traces of clients and engines that are gone. The *heartbeat* renews the engine's entry in the
registry. `Retention` trims long streams. `FinishedRetention` drops the oldest
finished traces. `Backpressure` slows traces whose
events wait for Redis.

An adapter that is told to stop takes no new traces, lets running ones finish for a while, fails the rest with the
reason on each trace's own stream, and leaves.
"""

from __future__ import annotations

import itertools
import logging
from contextlib import suppress
from functools import partial

import anyio

from tracewire_bus.bus import Bus, BusError
from tracewire_bus.domain.limit_table import changed
from tracewire_bus.domain.tree import ModuleTree
from tracewire_bus.transport.backoff import Backoff
from tracewire_bus.transport.errors import BusUnavailable
from tracewire_bus.transport.link import Link
from tracewire_bus.transport.tasks import Signal
from tracewire_bus.wire.messages import EngineInfo
from tracewire_engine.link.blob_receiver import BlobChunk
from tracewire_engine.protocol.adapters import name_prefix

from .audit import Audit
from .backpressure import Backpressure
from .bulk_writer import BulkWriter
from .claims import Claims
from .control import Control
from .engine_api import Engine
from .gate import Gate
from .http_requests import PlainRequests
from .intake import Intake
from .large_inputs import Inputs
from .leases import LeaseWatch
from .lifecycle import Lifecycle
from .live_changes import Steering
from .pause_ends import PauseEnds
from .pending import PendingRecords
from .placing import Placer
from .report_router import ReportRouter
from .retention import FinishedRetention, Retention
from .settings import Settings
from .standing_edits import StandingEdits
from .trace_limits import TraceLimits
from .trace_run import RunServices
from .validation import Validator
from .vector_files import VectorFiles

__all__ = ["Adapter", "Settings"]

logger = logging.getLogger("tracewire")
#: Number of slices of the time that the engine has for its answer.
_LOOKS = 10


class Adapter:
    """Serves one engine on the bus until it is stopped or the engine is lost."""

    #: Whether the engine has neither answered nor reported for a while.
    _silent = False

    def __init__(self, engine: Engine, info: EngineInfo, bus: Bus, settings: Settings | None = None) -> None:
        self._engine = engine
        self._info = info
        self._bus = bus
        self._settings = settings = settings or Settings()
        tree = ModuleTree(info)
        self._lifecycle = Lifecycle(info.engine)
        self.serving = self._lifecycle.serving
        self.stopping, self.draining = self._lifecycle.stopping, self._lifecycle.draining
        #: Set when `run` has returned.
        self.ended = anyio.Event()
        self._pending: dict[str, PendingRecords] = {}
        _describe(info, bus, settings)
        placer = Placer(info, tree, settings.saes, engine.token_strings)
        self._validator = Validator(info, tree, settings.code, settings.limits, placer)
        gate = Gate(settings.identity, bus.keys.prefix, info.model, info.engine, settings.limits)
        self._audit = Audit(bus, info, settings.audit)
        self._validator.keep = self._audit.keep
        self._validator.keep_refused = partial(self._audit.keep, refused=True)
        checks = self._validator.check_edit, self._renew, settings.code.permit, gate, self._audit
        self._standing = StandingEdits(bus, info, placer, *checks)
        self._reports = ReportRouter(engine, self._pending, settings.blob_threshold)
        self._steering = Steering(engine)
        self._retention = Retention(bus.snapshots, settings.retain_events, settings.retain_bytes)
        kept = settings.retain_traces, settings.retain_total_bytes
        self._finished = FinishedRetention(bus, info.engine, *kept, every_s=settings.heartbeat_s)
        #: The requests of the HTTP API, which are not traces.
        notify, choices = self._lifecycle.notify, settings.limits.choices
        self.plain = PlainRequests(bus, self._standing, self._reports, self._pending, info.engine, notify, choices)
        self._writer = bus.writer(memory_patience_s=settings.memory_patience_s)
        self._writer.signer, self._writer.riders = settings.identity.signer, self._audit
        self._claims = Claims(bus, info)
        self._writer.restorer.claims = self._claims.commands
        self._writer.restorer.claimed = self._claims.acknowledged
        self._control = Control(bus, info, self._claims, self._steering, self._lifecycle, gate, self._audit)
        self._recovery = bus.recovery(info.model)
        self._leases = LeaseWatch(bus, info, self._claims, self._control, self._recovery, settings.heartbeat_s)
        self._bulk = BulkWriter(bus, settings.bulk) if settings.bulk is not None else None
        services = self._services()
        self._intake = Intake(
            bus, services, self._validator, self._claims, self._control, self.plain, self._lifecycle, settings
        )
        self._backpressure = Backpressure(
            *(engine, self._writer, self._reports, self._pending, self._claims, self._lifecycle, settings.buffer_bytes)
        )
        self._pause_ends = PauseEnds(bus, self._claims, self._control)
        self._trace_limits = TraceLimits(self._claims, settings.limits, services.limit_counts, self._control.end)
        #: Whether the adapter takes new traces.
        self._taking = True
        #: Set when the engine's entry of the registry is to be renewed at once.
        self._beat = Signal()

    def note_limit(self, name: str) -> None:
        """Count that a limit was reached; `name` is as in `Limits`."""
        self._trace_limits.counts[name] += 1

    def _services(self) -> RunServices:
        """What the runs of traces use."""
        return RunServices(
            engine=self._engine,
            info=self._info,
            writer=self._writer,
            pending=self._pending,
            reports=self._reports,
            names=map(f"{name_prefix(self._settings.adapter)}{{}}".format, itertools.count()),
            blobs=self._bus.blobs,
            inputs=Inputs(
                self._bus.blobs, self._engine.inputs, self._engine.carrier, self._settings.limits.variable_bytes
            ),
            vectors=VectorFiles(self._bus.vectors, self._engine.inputs, self._engine.carrier),
            steering=self._steering,
            retention=self._retention,
            bulk=self._bulk,
            standing=self._standing,
            spans=self._settings.spans,
        )

    @property
    def lost(self) -> bool:
        """Whether the engine died under the adapter."""
        return self._lifecycle.lost

    @property
    def engine_paused(self) -> bool:
        """Whether the engine is paused as a whole until Redis has taken more."""
        return self._lifecycle.engine_paused

    @property
    def busy(self) -> bool:
        """Whether the adapter runs a trace or a request, or still has a call to the engine to make for one."""
        return bool(self._intake.scopes or self._control.busy or self._steering.busy or self.plain.busy)

    def stop(self) -> None:
        """Take no new traces. `run` returns when the running traces have ended, or `drain_s` seconds later."""
        self._lifecycle.stop(self._settings.drain_s)

    def give_up(self) -> None:
        """Stop now, since the engine is lost. Its traces wait for other engines."""
        self._lifecycle.give_up()

    def drain(self, within_s: float | None = None) -> None:
        """Stop for good, so that the supervisor does not restart the adapter.

        `run` returns when the running traces have ended, or `within_s` seconds later if that is given.
        """
        self._lifecycle.drain(within_s)

    async def run(self) -> None:
        """Serve until `stop` is called or the engine is lost (see `lost`)."""
        try:
            await self._run()
        finally:
            # Other engines should get the unfinished traces soon, even if a defect ended this adapter.
            with anyio.move_on_after(self._settings.last_words_s, shield=True) as scope:
                await self._leave()
            if scope.cancelled_caught:
                logger.warning("Redis did not answer in time: other engines notice later that this engine has exited")
            if self._bulk is not None:
                self._bulk.close()
            self.ended.set()

    async def _run(self) -> None:
        if self._bulk is not None:
            self._bulk.start()
        async with self._writer, anyio.create_task_group() as group:
            group.start_soon(self._reports.run)
            group.start_soon(self._reports.watch, self._settings.engine_patience_s)
            group.start_soon(self._read_large)
            group.start_soon(self._control.read)
            group.start_soon(self._steering.run)
            group.start_soon(self._control.run)
            group.start_soon(self._control.mend)
            group.start_soon(self._intake.refusals.run)
            group.start_soon(self._audit.run)
            group.start_soon(self._retention.run)
            group.start_soon(self._finished.run)
            if self._bulk is not None:
                group.start_soon(self._bulk.run)
            group.start_soon(self._backpressure.run)
            group.start_soon(self._trace_limits.run)
            group.start_soon(self._pause_ends.run)
            group.start_soon(self._watch_engine)
            await self._register()
            group.start_soon(self._heartbeat)
            group.start_soon(self._standing.follow)
            group.start_soon(self._standing.publish)
            group.start_soon(self.plain.run)
            group.start_soon(self._leases.run)
            async with anyio.create_task_group() as traces:
                await self._intake.take(traces)
                self._taking = False
                self._beat.notify()
                await self._intake.drain()
                with anyio.move_on_after(self._settings.last_words_s):
                    while self._intake.scopes:
                        await self._lifecycle.changed()
                # Tasks that still wait for Redis end here. `_leave` puts their entries back with the others.
                traces.cancel_scope.cancel()
            with anyio.move_on_after(self._settings.last_words_s):
                await self._standing.flushed()
                await self._audit.flushed()
            group.cancel_scope.cancel()

    async def _register(self) -> None:
        """Enter the registry. Waits for a Redis that does not answer, so that the model need not be loaded again."""
        backoff = Backoff()
        while not self.stopping.is_set():
            try:
                await self._standing.refresh()
                await self._renew()
            except BusUnavailable as error:
                if self._engine.lost:
                    return self._lifecycle.give_up()
                logger.log(backoff.level, "engine %s cannot serve yet, waits for Redis: %s", self._info.engine, error)
                with anyio.move_on_after(backoff.next()):
                    await self.stopping.wait()
                continue
            logger.info("serving %s as engine %s", self._info.model, self._info.engine)
            return self.serving.set()

    async def _leave(self) -> None:
        """Put unfinished traces back on the queue, and leave the registry.

        If this fails, other engines do both when this engine's lease has expired.
        """
        model, engine = self._info.model, self._info.engine
        which: list[tuple[str, int]] = []
        try:
            if self.lost:
                why = f"vLLM's engine died under {engine}"
                if back := await self._bus.queue.put_back(model, engine, why, lost=True, which=which):
                    logger.warning("%d traces wait for another engine", back)
                await self._recovery.finish_given_up()
            else:
                why = f"engine {engine} was shut down"
                await self._bus.queue.put_back(model, engine, why, lost=False, which=which)
            await self._bus.records.publish_waiting(which, why)
            await self._bus.registry.unregister(self._info.engine)
        except BusError as error:
            logger.warning("could not leave the registry, which forgets this engine by itself: %s", error)

    async def _read_large(self) -> None:
        """Write large arrays to the bus, and route the reports that come after them. Never ends by itself."""
        async for item in self._engine.large():
            if isinstance(item, BlobChunk):
                await self._keep(item)
            else:
                self._reports.take(item)

    async def _keep(self, chunk: BlobChunk) -> None:
        pending = self._pending.get(chunk.request)
        if pending is None:
            # The array's trace has already ended.
            return
        pending.note_chunk(len(chunk.data))
        self._reports.held_up = True
        try:
            await self._bus.blobs.put(pending.trace, chunk.blob, chunk.number, chunk.data, wait=True)
        except BusError:
            # A consumer that loads this blob finds it missing; the other traces go on.
            logger.exception("a chunk of a large value of trace %s was refused", pending.trace)
        finally:
            self._reports.held_up = False
            pending.note_chunk()

    async def _renew(self, link: Link | None = None) -> None:
        """Renew the engine's lease. Without it the intake takes no traces: other engines would take them over."""
        asked = anyio.current_time()
        await self._bus.registry.register(self._info, self._settings.lease_s, link)
        was = self._lifecycle.valid_until
        self._lifecycle.valid_until = max(was, asked + self._settings.lease_s)
        if was <= anyio.current_time():
            # The lease had run out, and the intake waits for its renewal.
            self._lifecycle.notify()

    async def _heartbeat(self) -> None:
        """Renew the lease in an endless loop, over a connection of its own, which no other call can hold up."""
        link, silent = self._bus.link(), False
        try:
            while True:
                silent = await self._beat_once(link, again=silent)
        finally:
            await link.drop()

    async def _beat_once(self, link: Link, *, again: bool) -> bool:
        """Renew the lease when it is time, or at once `again`. Returns whether Redis did not answer in time."""
        info = self._info
        if not again:
            with anyio.move_on_after(self._settings.heartbeat_s):
                await self._beat.wait()
        if self._engine.lost and not self.lost:
            logger.error("the engine of %s has died", info.engine)
            self._lifecycle.give_up()
        # Route reports of plain requests, for which no task waits.
        self._reports.pull()
        info.running = len(self._intake.scopes) + self.plain.running
        info.malformed, info.waiting_bytes = self._bus.guard.malformed, self._backpressure.waiting_bytes
        info.limits_reached = dict(self._trace_limits.counts)
        info.state = self._state()
        try:
            # A connection that does not answer for so long is replaced by the next try, before the lease is over.
            with anyio.fail_after(self._settings.lease_s / 3):
                await self._renew(link)
        except TimeoutError:
            logger.warning("the registry has not answered in time; the engine asks again over another connection")
            return True
        except BusError as error:
            # The engine goes on. Its events wait for Redis, and its entry is written again when Redis is back.
            logger.warning("the registry could not be renewed: %s", error)
        return False

    def _state(self) -> str:
        """The engine's state, as the registry has it (`EngineInfo`)."""
        if self.lost:
            return "lost"
        if not self._taking:
            return "draining"
        return "stalled" if self._silent else "holding" if self.engine_paused else "serving"

    def _note_silence(self, silent: bool) -> None:
        if silent != self._silent:
            self._silent = silent
            self._beat.notify()

    async def _watch_engine(self) -> None:
        """End the engine when it has neither answered nor reported for too long. Other engines then take its traces.

        Meanwhile the engine's state in the registry is `stalled`.
        """
        patience_s = self._settings.engine_patience_s
        while True:
            await anyio.sleep(patience_s / _LOOKS)
            if await self._answered(patience_s / _LOOKS):
                continue
            logger.error("engine %s has not answered for %g s; the adapter ends it", self._info.engine, patience_s)
            self._lifecycle.give_up()
            return

    async def _answered(self, slice_s: float) -> bool:
        """Whether the engine has answered or reported within `_LOOKS` slices of `slice_s` seconds."""
        answered = anyio.Event()

        async def ask() -> None:
            with suppress(Exception):
                # The task that renews the engine's entry notices that the engine is dead.
                await self._engine.answers()
            answered.set()

        async with anyio.create_task_group() as asking:
            asking.start_soon(ask)
            reported = self._reports.count
            for _ in range(_LOOKS):
                # In slices: if this process was suspended, one slice is over, and the engine still gets time to answer.
                with anyio.move_on_after(slice_s):
                    await answered.wait()
                if answered.is_set() or self._reports.count != reported:
                    self._note_silence(False)
                    break
                self._note_silence(True)
            else:
                asking.cancel_scope.cancel()
                return False
            asking.cancel_scope.cancel()
        return True


def _describe(info: EngineInfo, bus: Bus, settings: Settings) -> None:
    """Write into the engine's entry of the registry what its settings say."""
    info.retention_s, info.limits = bus.retention_s, changed(settings.limits)
    info.code, info.code_reason = settings.code.code, settings.code.reason
    identity = settings.identity
    info.unsigned, info.public_key = identity.unsigned, "" if identity.signer is None else identity.signer.public
