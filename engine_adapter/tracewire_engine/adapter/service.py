"""The adapter: one task group that takes submissions, runs each as a trace, and answers for its engine.

Tasks: *intake* takes submissions off the model's queue, up to the engine's capacity; one task a trace runs it
(`trace_run.py`), which gets what the workers report by `report_router.py`; the *blob reader* brings their large arrays
to the bus first; *control* reads what is asked of running traces, *steering* brings changes of live parameters to the
workers, the *reaper* aborts what is to end early, and pauses and resumes; the *heartbeat* renews the engine's entry in
the registry; another task looks after clients and engines that have gone and deadlines that have passed; *retention*
trims long streams, and drops finished traces that are too many. When the adapter is told to stop it takes nothing new,
lets what runs finish for a while, fails the rest with the reason on each trace's own stream, and leaves.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import anyio
import msgspec

from tracewire_bus.bus import Bus, BusError, Fenced, Taken, Writer
from tracewire_bus.domain.limits import MAX_TRACE_ID, LimitExceeded, check_size, check_submission, measure
from tracewire_bus.domain.tree import ModuleTree
from tracewire_bus.store.blobs import THRESHOLD_BYTES
from tracewire_bus.store.control import Order
from tracewire_bus.store.keys import TAGS
from tracewire_bus.store.lifecycle import telling
from tracewire_bus.store.submission_queue import claiming
from tracewire_bus.store.trace_records import Opened, Overtaken, TraceEnded, TraceMissing, cancellation
from tracewire_bus.transport.connection import Backoff, BusUnavailable, Wakeup
from tracewire_bus.transport.guard import Malformed
from tracewire_bus.wire.codec import NewerSchema, check_schema, decode_submission, encode
from tracewire_bus.wire.live_values import LiveError, parted
from tracewire_bus.wire.messages import Block, EngineInfo, Failure, Final, Status, StopWhen, Submission
from tracewire_bus.wire.values import unpack
from tracewire_engine.link.blob_receiver import BlobChunk

from .block_sources import Sources
from .engine_api import Engine, EngineLost, Rejection
from .http_requests import PlainRequests
from .large_inputs import Inputs
from .live_changes import LiveTrace, Steering
from .pending import REPORT_S, Half
from .report_router import Reports
from .retention import FinishedRetention, Retention
from .standing_edits import Chosen, Standing, place
from .trace_run import Blocks, TraceRun, first

__all__ = ["Adapter", "Settings"]

logger = logging.getLogger("tracewire")

T = TypeVar("T")

#: Up to how many bytes a part of a submission need not be measured.
_SHORT = 8 * 1024
#: Up to how many bytes and values a submission is looked at on the event loop. An array of any size is one value.
_LIGHT_BYTES, _LIGHT_VALUES = 1024 * 1024, 2048
#: Of how many of the traces' hash tags each heartbeat ends what is past its deadline and runs nowhere.
SWEPT = TAGS // 8
#: How often is looked how much waits for Redis, in seconds.
_PRESS_S = 0.05
#: How soon an engine that was neither held nor let go on is asked again, in seconds.
_PRESS_AGAIN_S = 1.0
#: How long one wait for orders lasts, in milliseconds.
_CONTROL_MS = 2000
#: What a heartbeat may take longer than it should before clients get their time anew, in seconds.
_STALL_S = 1.0
#: How long Redis is let be after it has refused what would be asked again at once, in seconds: first, and at most.
_REFUSED_S, _REFUSED_MOST_S = 0.2, 5.0
#: In how many slices the engine's time to answer passes.
_LOOKS = 10
#: How many placed interventions are remembered, and of how many bytes at most.
_REMEMBERED, _LONG = 64, 128 * 1024
_NO_LIVE = msgspec.msgpack.encode({})
_NOTHING: Mapping[Any, Any] = MappingProxyType({})


class _Interventions(msgspec.Struct):
    """Of a submission, its interventions as they are encoded."""

    interventions: msgspec.Raw


_interventions = msgspec.msgpack.Decoder(_Interventions)


@dataclass(frozen=True)
class Settings:
    """How an adapter behaves. Times in seconds."""

    heartbeat_s: float = 1.0
    lease_s: float = 5.0
    #: How long traces may go on after the adapter was told to stop.
    drain_s: float = 10.0
    #: How long one wait for submissions lasts, which is how soon a stop is noticed by an idle intake.
    poll_s: float = 0.5
    #: How long a stopping adapter waits for Redis to take the last events.
    last_words_s: float = 5.0
    #: Arrays of more bytes than this, read by declared interventions, go into blobs (0: none does).
    blob_threshold: int = THRESHOLD_BYTES
    #: About how many events, and how many bytes of them as they were encoded, a trace's stream keeps (0: any number).
    retain_events: int = 0
    retain_bytes: int = 0
    #: How many finished traces are kept, and how many bytes of Redis they may take, in all (0: any number).
    retain_traces: int = 0
    retain_total_bytes: int = 0
    #: How much of what Redis has not acknowledged yet is kept here, in bytes, before the engine is held.
    buffer_bytes: int = 256 * 1024 * 1024
    #: How long a trace waits for a Redis whose memory is full before it fails.
    memory_patience_s: float = 60.0
    #: How long the engine may take to report a step, or to answer a call, before it counts as lost.
    engine_patience_s: float = REPORT_S


class Adapter:
    """Serves one engine on the bus until it is stopped or the engine is lost."""

    def __init__(self, engine: Engine, info: EngineInfo, bus: Bus, settings: Settings | None = None) -> None:
        self._engine = engine
        self._info = info
        self._bus = bus
        self._settings = settings or Settings()
        self._tree = ModuleTree(info)
        self._halves: dict[str, Half] = {}
        self._sources = Sources(info, self._tree)
        #: One thread at a time for submissions that take long to look at: several would only wait for each other.
        self._looking = anyio.CapacityLimiter(1)
        self._standing = Standing(bus, info, self._tree, self._check_block, self._renew)
        self._inputs = Inputs(bus.blobs, engine.inputs, engine.carrier)
        self._reports = Reports(engine, self._halves, (settings or Settings()).blob_threshold)
        self._retention = Retention(bus.snapshots, self._settings.retain_events, self._settings.retain_bytes)
        self._finished = FinishedRetention(
            *(bus, info.engine, self._settings.retain_traces, self._settings.retain_total_bytes),
            every_s=self._settings.heartbeat_s,
        )
        info.retention_s = bus.retention_s
        self._names = itertools.count()
        #: The requests that are made of the engine beside its traces.
        self.plain = PlainRequests(bus, self._standing, self._reports, self._halves, info.engine, self._notify)
        self._steering = Steering(engine)
        #: The runs that orders may come for; a list of orders for a trace that is about to have one.
        self._by_trace: dict[str, TraceRun | list[Order]] = {}
        self._reaping: deque[TraceRun] = deque()
        self._aborting = 0
        self._settling: deque[TraceRun] = deque()
        self._reap = Wakeup()
        #: Since when the lease of a client with running or waiting traces has been missing.
        self._missing: dict[str, float] = {}
        #: Entries that Redis is being told to be ours, by trace; and those that it has been told of, to be looked at.
        self._telling: dict[str, Taken] = {}
        self._told_again: dict[str, Taken] = {}
        #: The last event of each run when it was last looked after.
        self._told: dict[TraceRun, int] = {}
        self._recovery = bus.recovery(info.model)
        #: Waits after Redis has refused to hand out an entry, or to have one begun.
        self._refused = Backoff(_REFUSED_S, _REFUSED_MOST_S)
        #: Until when others see that this engine lives, at least.
        self._valid_until = -math.inf
        #: When it was last looked for.
        self._looked = -math.inf
        self._tags = itertools.cycle(bus.keys.tags[os.getpid() % TAGS :] + bus.keys.tags[: os.getpid() % TAGS])
        self._runs: set[anyio.CancelScope] = set()
        #: Set when the registry has it.
        self.serving = anyio.Event()
        #: Set when it takes nothing new any more.
        self.stopping = anyio.Event()
        #: Set when it was asked on the bus to leave for good: nobody is to start it again.
        self.draining = anyio.Event()
        #: By when what runs has to end, by the event loop's clock.
        self._until = math.inf
        #: Whether new traces are taken.
        self._taking = True
        #: What the registry says is to be said anew.
        self._beat = Wakeup()
        self._changed = anyio.Event()
        self._blocks = msgspec.msgpack.Encoder()
        #: Interventions with their locations, encoded, by what they and their live parameters were sent as.
        self._placed: dict[bytes, bytes] = {}
        #: What runs, and by when it is to have ended, for a Redis that has forgotten.
        self._claimed: dict[str, tuple[Taken, Submission, float | None]] = {}
        #: Whether the engine is held until Redis has taken more.
        self.holding = False
        #: Set when the engine died under the adapter.
        self.lost = False
        #: Set when `run` has returned.
        self.ended = anyio.Event()

    @property
    def busy(self) -> bool:
        """Whether it runs any trace, or has something left to say to its engine about one."""
        return bool(self._runs or self._reaping or self._aborting or self._steering.busy or self.plain.busy)

    def stop(self) -> None:
        """Take nothing new; `run` returns when what runs has ended, or `drain_s` later."""
        self._stop(self._settings.drain_s)

    def drain(self, within_s: float | None = None) -> None:
        """Likewise, for good, and when what runs has ended, or `within_s` later, if that is given."""
        if not self.draining.is_set():
            within = "" if within_s is None else f", within {within_s:g} s"
            logger.info("engine %s was asked to drain%s", self._info.engine, within)
            self.draining.set()
        self._stop(math.inf if within_s is None else within_s)

    def _stop(self, within_s: float) -> None:
        # Of several times the earliest counts.
        self._until = min(self._until, anyio.current_time() + within_s)
        self.stopping.set()
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def run(self) -> None:
        """Serve until `stop` is called or the engine is lost (see `lost`)."""
        try:
            await self._run()
        finally:
            # Others should have what was left undone soon, also where this ends by a defect of ours.
            with anyio.move_on_after(self._settings.last_words_s, shield=True) as scope:
                await self._leave()
            if scope.cancelled_caught:
                logger.warning("Redis was away: others find out by themselves that this engine has left")
            self.ended.set()

    async def _run(self) -> None:
        patience_s = self._settings.memory_patience_s
        async with self._bus.writer(memory_patience_s=patience_s) as writer, anyio.create_task_group() as group:
            writer.claims = self._claims
            writer.claimed = self._claims_told
            group.start_soon(self._reports.run)
            group.start_soon(self._reports.watch, self._settings.engine_patience_s)
            group.start_soon(self._read_large)
            group.start_soon(self._control)
            group.start_soon(self._steering.run)
            group.start_soon(self._reaper)
            group.start_soon(self._retention.run)
            group.start_soon(self._finished.run)
            group.start_soon(self._press, writer)
            group.start_soon(self._watch_engine)
            await self._register()
            group.start_soon(self._heartbeat)
            group.start_soon(self._standing.follow)
            group.start_soon(self._standing.tell)
            group.start_soon(self.plain.run)
            group.start_soon(self._look_after_others)
            async with anyio.create_task_group() as traces:
                await self._take(writer, traces)
                self._taking = False
                self._beat.notify()
                await self._drain()
                with anyio.move_on_after(self._settings.last_words_s):
                    while self._runs:
                        await self._changed.wait()
                # What Redis keeps waiting, such as an entry that is being opened, is put back with all else.
                traces.cancel_scope.cancel()
            with anyio.move_on_after(self._settings.last_words_s):
                await self._standing.told()
            group.cancel_scope.cancel()

    async def _register(self) -> None:
        """Enter the registry, which may have to wait for Redis: the model is loaded, and need not be so again."""
        backoff = Backoff()
        while not self.stopping.is_set():
            try:
                await self._standing.look()
                await self._renew()
            except BusUnavailable as error:
                if self._engine.lost:
                    self.lost = True
                    return self.stop()
                logger.log(backoff.level, "engine %s waits for Redis to serve: %s", self._info.engine, error)
                with anyio.move_on_after(backoff.next()):
                    await self.stopping.wait()
                continue
            logger.info("serving %s as engine %s", self._info.model, self._info.engine)
            return self.serving.set()

    async def _leave(self) -> None:
        """Let others have what was left undone, and leave the registry. Both come to pass by themselves otherwise."""
        model, engine = self._info.model, self._info.engine
        which: list[tuple[str, int]] = []
        try:
            if self.lost:
                why = f"vLLM's engine died under {engine}"
                if back := await self._bus.queue.put_back(model, engine, why, lost=True, which=which):
                    logger.warning("%d traces wait for another engine", back)
                await self._recovery.bury()
            else:
                why = f"engine {engine} was shut down"
                await self._bus.queue.put_back(model, engine, why, lost=False, which=which)
            await self._bus.records.wait(which, why)
            await self._bus.unregister(self._info.engine)
        except BusError as error:
            logger.warning("could not leave the registry, which forgets this engine by itself: %s", error)

    # --- intake -----------------------------------------------------------------------------------------------------

    async def _take(self, writer: Writer, traces: anyio.abc.TaskGroup) -> None:
        while not self.stopping.is_set():
            room = self._info.capacity - len(self._runs) - self.plain.running
            valid_s = self._valid_until - anyio.current_time()
            if room <= 0 or valid_s <= 0 or self.holding:
                await self._changed.wait()
                continue
            wait_ms = int(min(self._settings.poll_s, valid_s) * 1000)
            try:
                taken = await self._bus.queue.take(self._info.model, self._info.engine, min(room, 64), wait_ms, room)
            except BusError as error:
                # What runs goes on, and whoever has made it so may mend it.
                logger.error("nothing can be taken from the queue: %s", error)
                await self._let_be()
                continue
            for entry in taken:
                scope = anyio.CancelScope()
                self._runs.add(scope)
                traces.start_soon(self._serve, writer, entry, scope)

    async def _let_be(self) -> None:
        """Wait a while before asking again for what Redis has refused, or until we are told to stop."""
        with anyio.move_on_after(self._refused.next()):
            await self.stopping.wait()

    async def _drain(self) -> None:
        """Let what runs finish, for as long as there is, then end it."""
        while (self._runs or self.plain.busy) and not self.lost and (left_s := self._until - anyio.current_time()) > 0:
            with anyio.move_on_after(left_s):
                await self._changed.wait()
        for scope in self._runs:
            scope.cancel()

    async def _serve(self, writer: Writer, entry: Taken, scope: anyio.CancelScope) -> None:
        """Run one queue entry to its final event, whatever it holds. Raises nothing: the others run on."""
        try:
            opened = await self._open(writer, entry)
            if opened is not None:
                await self._run_trace(writer, entry, scope, *opened)
        except Malformed as error:
            # Its record: the next answer would be the same.
            await self._fail(entry, Failure(type="TraceRejected", message=str(error)))
        except BusError as error:
            # It is ours still, and comes again, but not at once: the next answer may be the same.
            logger.warning("queue entry %s could not be served: %s", entry.trace, error)
            await self._let_be()
            self._bus.queue.forgo(self._info.model, self._info.engine, entry.trace)
        except Exception as error:  # a defect of ours: one entry's misfortune
            logger.exception("queue entry %s could not be served", entry.trace)
            await self._fail(entry, Failure(type=type(error).__name__, message=f"the adapter failed: {error}"))
        finally:
            self._runs.discard(scope)
            self._notify()

    async def _fail(self, entry: Taken, failure: Failure) -> None:
        """End a trace that could not even be begun."""
        try:
            await self._bus.records.end(entry.trace, "failed", failure)
            await self._bus.queue.done(self._info.model, entry.trace, self._info.engine)
        except BusError as error:
            # It comes again, and is answered then.
            logger.warning("nor could queue entry %s be answered: %s", entry.trace, error)
            await self._let_be()
            self._bus.queue.forgo(self._info.model, self._info.engine, entry.trace)

    async def _run_trace(
        self,
        writer: Writer,
        entry: Taken,
        scope: anyio.CancelScope,
        submission: Submission,
        blocks: Blocks,
        declared: bytes | None,
        edits: list[Chosen],
    ) -> None:
        trace = submission.trace
        while trace in self._by_trace:
            # It was taken from us while we ran it, and came back.
            await self._changed.wait()
        early: list[Order] = []
        self._by_trace[trace] = early
        try:
            try:
                opened = await self._bus.records.open(trace, self._info.engine, entry.attempt)
            except TraceEnded:
                # It was cancelled, or expired, before anybody took it; or its engine was lost behind its end.
                await self._bus.queue.done(self._info.model, entry.trace, self._info.engine)
                return
            except Overtaken:
                self._refused.reset()
                # We were slow, and somebody took it from us. Should it be ours still, Redis has forgotten how often it
                # was taken, as after a failover: the next number may be late enough.
                why = "somebody else has begun it"
                await self._bus.queue.put_back(
                    self._info.model, self._info.engine, why, lost=False, trace=entry.trace, attempt=entry.attempt
                )
                self._bus.queue.settled(self._info.model, entry.trace)
                return
            self._refused.reset()
            run = self._run_of(writer, entry, submission, blocks, declared, edits, opened)
            due = None if opened.left_s is None else anyio.current_time() + opened.left_s
            self._claimed[trace] = entry, submission, due
            self._by_trace[trace] = run
            for order in early:
                self._obey(order)
            try:
                await self._run_to_its_end(entry, scope, submission, run, opened)
            finally:
                if run.live is not None:
                    self._steering.over(run.live)
        finally:
            del self._by_trace[trace]
            self._claimed.pop(trace, None)
            writer.forget(trace)

    def _run_of(
        self,
        writer: Writer,
        entry: Taken,
        submission: Submission,
        blocks: Blocks,
        declared: bytes | None,
        edits: list[Chosen],
        opened: Opened,
    ) -> TraceRun:
        live: LiveTrace | None = None
        if submission.live != _NO_LIVE:
            if opened.version:
                key = self._bus.keys.record(submission.trace)
                self._bus.guard.demand(_check_same, submission.live, opened.live, key=key, entry="live parameters")
                submission = msgspec.structs.replace(submission, live=opened.live)
            stops = [one for one in submission.interventions if isinstance(one, StopWhen)]
            live = LiveTrace(f"r{next(self._names)}", submission.live, opened.version, opened.changes, stops)
        run = TraceRun(
            self._engine,
            self._info,
            writer,
            self._halves,
            submission,
            blocks,
            declared,
            attempt=opened.attempt,
            queued_at=entry.queued_at,
            names=self._names,
            blobs=self._bus.blobs,
            reports=self._reports,
            live=live,
            close=partial(self._bus.records.close, submission.trace, opened.attempt),
            why=entry.why,
            tally=self._retention.tally(submission.trace, opened.attempt),
            edits=edits,
            standing=self._standing,
        )
        if opened.cancelled is not None:
            run.end("cancelled", cancellation(*opened.cancelled))
        run.pauses = opened.pauses
        if opened.paused is not None:
            run.hold(opened.paused)
        return run

    async def _run_to_its_end(
        self, entry: Taken, scope: anyio.CancelScope, submission: Submission, run: TraceRun, opened: Opened
    ) -> None:
        timer: asyncio.TimerHandle | None = None
        if opened.left_s is not None:
            message = f"its deadline of {submission.deadline_s or 0:g} s from when it was queued has passed"
            failure = Failure(type="DeadlineExceeded", message=message, field="deadline")
            if opened.left_s <= 0:
                run.end("expired", failure)
            else:
                timer = asyncio.get_running_loop().call_later(opened.left_s, self._end, run, "expired", failure)
        problem: Failure | None = None
        handed_over = False
        status: Status = "failed"
        model, engine = self._info.model, self._info.engine
        try:
            with scope:
                async with self._inputs.of(submission):
                    await run.run()
        except Rejection as rejection:
            status, problem = "rejected", rejection.failure
        except EngineLost as error:
            if self.stopping.is_set() and not self._engine.lost:
                # All processes were told to stop at once, us among them. The others finish what they run.
                logger.info("trace %s is handed over: %s", submission.trace, error)
                handed_over = True
            else:
                logger.error("engine %s is lost: %s", engine, error)
                self.lost = True
                self.stop()
        except Fenced:
            raise
        except Exception as error:
            logger.exception("trace %s failed in the adapter", submission.trace)
            # Of several invokes it may come in a group.
            cause = first(error)
            problem = Failure(type=type(cause).__name__, message=f"the adapter failed: {cause}")
        finally:
            if timer is not None:
                timer.cancel()
        if (scope.cancelled_caught or handed_over) and not self.lost and entry.tries <= 1:
            # Any other waits for another engine from when this one has left.
            problem = Failure(type="EngineShutdown", message=f"engine {engine} was shut down while it ran this trace")
        if problem is not None and not run.ended:
            # A Redis that is away must not keep a stopping engine from leaving.
            with anyio.move_on_after(self._settings.last_words_s if self.stopping.is_set() else None, shield=True):
                await run.abort_all()
                await run.fail(problem, status=status)
        if run.fenced:
            if await self._bus.records.ended(submission.trace):
                await self._bus.queue.done(model, entry.trace, engine)
            else:
                # Another engine's by now, and if not, whoever's that takes it next.
                why = "somebody else wrote to its stream"
                await self._bus.queue.put_back(model, engine, why, lost=True, trace=entry.trace, attempt=entry.attempt)
                self._bus.queue.settled(model, entry.trace)

    # --- a Redis that is away ---------------------------------------------------------------------------------------

    def _claims(self) -> list[tuple[Any, ...]]:
        """What says again which traces run here, for a server that came back without having heard of it."""
        records, model, engine = self._bus.records, self._info.model, self._info.engine
        commands: list[tuple[Any, ...]] = []
        for trace, run in self._by_trace.items():
            if not isinstance(run, TraceRun) or run.ended or run.fenced:
                continue
            entry, submission, due = self._claimed[trace]
            self._telling[trace] = entry
            if due is not None:
                submission = msgspec.structs.replace(submission, deadline_s=max(0.0, due - anyio.current_time()))
            live = run.live
            commands += [
                records.creation(submission, parted(submission.live), self._bus.retention_s),
                records.claiming(
                    *(trace, engine, run.attempt),
                    closed=run.closed,
                    version=0 if live is None else live.version,
                    live={} if live is None else live.changed,
                    paused=run.paused_by,
                    pauses=run.pauses,
                ),
                claiming(
                    *(self._bus.keys, model, engine, entry),
                    client=submission.client,
                    priority=submission.priority,
                    lease="" if submission.detach else submission.lease,
                ),
            ]
        return commands

    def _claims_told(self) -> None:
        self._told_again |= self._telling
        self._telling.clear()

    async def _look_after_claims(self) -> None:
        """Give back what Redis has been told to be ours, and ceased to be so before it heard it. Nobody else would."""
        model, engine = self._info.model, self._info.engine
        for trace, entry in list(self._told_again.items()):
            claimed = self._claimed.get(trace)
            run = self._by_trace.get(trace)
            # Its final takes the entry from the queue, behind the claim.
            if claimed is None or claimed[0] is not entry or (isinstance(run, TraceRun) and run.fenced):
                why = f"engine {engine} runs it no more"
                await self._bus.queue.put_back(model, engine, why, lost=False, trace=entry.trace, attempt=entry.attempt)
                if claimed is None:
                    self._bus.queue.settled(model, entry.trace)
            if self._told_again.get(trace) is entry:
                del self._told_again[trace]

    async def _press(self, writer: Writer) -> None:
        """Hold the engine while more waits for Redis than is to be kept here, until half of that is left."""
        most = self._settings.buffer_bytes
        while True:
            await anyio.sleep(_PRESS_S)
            if not self.holding and not self._by_trace:
                continue
            # What lies in the link is here, too.
            self._reports.pull()
            waiting = writer.backlog + sum(half.held for half in self._halves.values())
            waiting += sum(run.held for run in self._by_trace.values() if isinstance(run, TraceRun))
            if self.holding == (waiting > (most // 2 if self.holding else most)):
                continue
            self.holding = not self.holding
            try:
                if self.holding:
                    logger.warning("%d bytes wait for Redis: the engine is held", waiting)
                    await self._engine.hold()
                else:
                    logger.warning("Redis has taken what waited: the engine goes on")
                    await self._engine.go_on()
            except EngineLost as error:
                logger.debug("the engine was neither held nor let go on: %s", error)
            except Exception as error:  # of a type of its own, from an engine that was told to stop
                self.holding = not self.holding
                logger.warning("the engine was neither held nor let go on: %s", error)
                await anyio.sleep(_PRESS_AGAIN_S)
            self._notify()

    # --- control ----------------------------------------------------------------------------------------------------

    async def _control(self) -> None:
        """Read what is asked of running traces, and see to it."""
        reader = self._bus.control(self._info.engine)
        try:
            while True:
                try:
                    orders = await reader.read(_CONTROL_MS)
                except BusError as error:
                    logger.error("what is asked of traces cannot be read: %s", error)
                    await anyio.sleep(_CONTROL_MS / 1000)
                    continue
                for order in orders:
                    if order.kind == "drain":
                        self.drain(order.within_s)
                        continue
                    if order.kind == "cancel" and order.trace not in self._by_trace:
                        await self._cancel(order)
                    self._obey(order)
        finally:
            with anyio.CancelScope(shield=True):
                await reader.aclose()

    async def _cancel(self, order: Order) -> None:
        """Cancel a trace that the bus took for ours: it was taken from us, and may wait, or run elsewhere."""
        try:
            _, model = await self._bus.records.cancel(order.trace, by=order.by, reason=order.reason, force=True)
            await self._bus.queue.withdraw(model, order.trace)
        except (TraceEnded, TraceMissing):
            return
        except BusError as error:
            logger.warning("trace %s could not be cancelled: %s", order.trace, error)

    def _obey(self, order: Order) -> None:
        run = self._by_trace.get(order.trace)
        if isinstance(run, list):
            run.append(order)
        elif run is None:
            # It has ended.
            return
        elif order.kind in ("pause", "resume"):
            run.hold(order.by, resume=order.kind == "resume", number=order.number)
            self._settling.append(run)
            self._reap.notify()
        elif order.kind == "cancel":
            self._end(run, "cancelled", cancellation(order.by, order.reason))
        elif run.live is not None:
            key = self._bus.keys.record(order.trace)
            values = self._bus.guard.read(run.live.take, order.change, key=key, entry="a change of live parameters")
            if values:
                self._steering.send(run.live, values)

    def _end(self, run: TraceRun, status: Status, failure: Failure) -> bool:
        """Have a run end before its own end. Returns whether that is news."""
        news = run.end(status, failure)
        if news:
            self._reaping.append(run)
            self._reap.notify()
        return news

    async def _reaper(self) -> None:
        """Abort the requests of what is to end early, whose run then ends as it was told; and pause and resume."""
        # What is told of a pause waits for Redis, and nobody's abort waits for that.
        async with anyio.create_task_group() as settling:
            while True:
                while not self._reaping and not self._settling:
                    await self._reap.wait()
                if not self._reaping:
                    settling.start_soon(self._settle, self._settling.popleft())
                    continue
                self._aborting += 1
                settling.start_soon(self._abort, self._reaping.popleft())

    async def _abort(self, run: TraceRun) -> None:
        try:
            await run.abort_all()
        except Exception:
            logger.exception("a trace that is to end could not be aborted")
        finally:
            self._aborting -= 1

    async def _settle(self, run: TraceRun) -> None:
        try:
            await run.settle()
        except (Fenced, EngineLost) as error:
            # Its run finds out by itself.
            logger.debug("a trace was neither paused nor resumed: %s", error)
        except Exception:  # one trace's misfortune
            logger.exception("a trace could not be paused or resumed")

    async def _look_after_own(self) -> None:
        """Let go of what others have ended or begun since: who writes finds that out, a paused run never would."""
        engine, was = self._info.engine, self._told
        runs = [run for run in self._by_trace.values() if isinstance(run, TraceRun) and not run.ended]
        self._told = {run: run.seq for run in runs}
        quiet = [run for run in runs if was.get(run) == run.seq]
        theirs = await self._bus.records.overtaken(engine, [(run.trace, run.attempt) for run in quiet])
        for run, over in zip(quiet, theirs, strict=True):
            # Its stream refuses that.
            lost = Failure(type="EngineLost", message="others have ended or begun it since")
            if over and self._end(run, "failed", lost):
                logger.warning("trace %s was taken from this engine: its attempt %d ends", run.trace, run.attempt)

    async def _look_after_clients(self) -> None:
        """End the traces of clients whose leases are gone, and stay so while a client that lives could have renewed."""
        running: dict[str, list[TraceRun]] = {}
        for run in self._by_trace.values():
            if isinstance(run, TraceRun) and run.lease:
                running.setdefault(run.lease, []).append(run)
        # All that waits is looked at by one of the engines.
        cares = self._recovery.cares
        waiting = {lease for lease in await self._bus.queue.leases(self._info.model) if lease} if cares else set()
        leases = [*running, *(waiting - running.keys())]
        held = await self._bus.records.held(leases)
        now = anyio.current_time()
        if now - self._looked > self._settings.heartbeat_s + _STALL_S:
            # Redis was away, or this loop stood still: so it may have been for the clients.
            self._missing.clear()
        self._looked = now
        self._missing = {lease: self._missing.get(lease, now) for lease in leases if lease not in held}
        for lease, since in self._missing.items():
            if now - since >= _patience_of(lease):
                for run in running.get(lease, ()):
                    self._end(run, "cancelled", cancellation("the bus", "its submitter has gone"))
                if lease in waiting:
                    await self._bus.bury(self._info.model, lease, by="the bus")

    async def _open(self, writer: Writer, entry: Taken) -> tuple[Submission, Blocks, bytes | None, list[Chosen]] | None:
        """Decode and check an entry: its submission, its invokes' encoded blocks, its encoded declared interventions,
        and the standing interventions of each invoke, if there are any.

        What cannot be run is answered or dead-lettered, and is `None`.
        """
        trace = entry.fields.get(b"t", b"").decode("utf-8", "replace")
        try:
            check_schema(entry.fields.get(b"v", b"").decode("ascii", "replace"))
            data = entry.fields.get(b"d", b"")
            submission, light = await self._decoded(data)
            if submission.trace != trace:
                raise ValueError(f"its entry names trace {trace[:300]!r}, its body {submission.trace[:300]!r}")
            blocks = await self._check(submission)
            declared = await self._look(light, self._place, submission, data)
            edits = self._choose(submission)
        except Rejection as rejection:
            failure = rejection.failure
        except LimitExceeded as error:
            failure = Failure(type="TraceRejected", message=error.message, field=error.field)
        except NewerSchema as error:
            failure = Failure(type="TraceRejected", message=str(error), field="schema")
        except ValueError as error:
            self._bus.guard.note(self._bus.keys.queue(self._info.model, "data"), entry.trace, error)
            failure = Failure(
                type="TraceRejected",
                message=f"the submission could not be decoded: {str(error)[:1000]}",
                field="submission",
            )
        else:
            return submission, blocks, declared, edits
        if not 0 < len(trace) <= MAX_TRACE_ID or "\ufffd" in trace:
            logger.warning("dead-lettering entry %s: %s", entry.trace, failure.message)
            await self._bus.queue.dead_letter(self._info.model, entry, failure.message)
            return None
        final = Final(attempt=entry.attempt, seq=0, status="rejected", error=failure, time=time.time())
        settled = (self._info.model, entry.trace, self._info.engine, entry.attempt)
        try:
            life = telling(
                "final",
                trace,
                model=self._info.model,
                engine=self._info.engine,
                attempt=entry.attempt,
                status=final.status,
                error=failure.type,
                usage=final.usage,
            )
            await writer.append(trace, entry.attempt, 0, encode(final), final=True, done=settled, life=life)
        except Fenced:
            logger.warning("trace %s has ended already; its rejection was dropped", trace)
            self._bus.queue.settled(self._info.model, entry.trace)
        return None

    async def _look(self, light: bool, look: Callable[..., T], *arguments: Any) -> T:
        """`look(*arguments)`: at once where there is little to look at, or else on a thread. Then the event loop serves
        others meanwhile, and what comes in a burst comes one by one.
        """
        if light:
            return look(*arguments)
        return await anyio.to_thread.run_sync(look, *arguments, limiter=self._looking)

    async def _decoded(self, data: bytes) -> tuple[Submission, bool]:
        """A submission that is no more than one may be, and whether it is little.

        Raises:
            LimitExceeded: it is more.
            ValueError: it is none.
        """
        check_size(len(data))
        light = len(data) <= _LIGHT_BYTES
        light &= await self._measure([("submission", data)])
        submission = decode_submission(data)
        check_submission(submission)
        packed = [("live", submission.live), ("shared", submission.shared)]
        for block in (submission.block, *(invoke.block for invoke in submission.invokes)):
            packed += [("block.variables", block.variables)] if block is not None else []
        packed += [("prompt.multi_modal_data", invoke.media) for invoke in submission.invokes]
        light &= await self._measure(packed)
        return submission, light

    async def _measure(self, parts: Sequence[tuple[str, bytes]]) -> bool:
        """Refuse parts of a submission that hold too much. Returns whether they hold little.

        Raises:
            LimitExceeded: one does.
        """
        # What is shorter holds no more than it has bytes.
        long = [(field, data) for field, data in parts if len(data) > _SHORT]
        with suppress(LimitExceeded):
            left = _LIGHT_VALUES
            for field, data in long:
                left -= measure(data, field, left)
            return True
        await self._look(False, lambda: [measure(data, field) for field, data in long])
        return False

    async def _check(self, submission: Submission) -> Blocks:
        """What can be told without the engine. Returns the encoded block of each invoke.

        Raises:
            Rejection: naming the field.
        """
        if submission.model != self._info.model:
            raise Rejection("model", f"this engine serves {self._info.model!r}, not {submission.model!r}")
        if not submission.invokes:
            raise Rejection("prompt", "a trace takes at least one prompt")
        try:
            parted(submission.live)
        except LiveError as error:
            raise Rejection(f"live.{error.name}" if error.name else "live", error.message) from error
        try:
            shared = unpack(submission.shared)
        except ValueError as error:
            raise Rejection("shared", f"the shared values could not be decoded: {error}") from error
        if not isinstance(shared, dict):
            raise Rejection("shared", "expected a dict of values by name")
        encoded: dict[int, bytes] = {}
        for index, block in enumerate([submission.block, *(invoke.block for invoke in submission.invokes)]):
            if block is not None:
                await self._check_block(block, shared)
                encoded[index] = self._blocks.encode(block)
        return [encoded.get(index, encoded.get(0)) for index in range(1, len(submission.invokes) + 1)]

    async def _check_block(self, block: Block, shared: Mapping[Any, Any] = _NOTHING) -> None:
        """Refuse a block that cannot run here, of a trace that shares these values."""
        await self._check_source(block)
        for name, path in block.paths.items():
            if not self._tree.knows(path):
                near = self._tree.nearest(path)
                hint = f"; the nearest that does is {near!r}" if near else ""
                message = f"{name!r} stands for the module {path!r}, which does not exist in {self._info.model}{hint}"
                raise Rejection("block", message, type="UnknownModulePath")
        missing = sorted(set(block.shared.values()) - shared.keys())
        if missing:
            raise Rejection("shared", f"{block.name} uses shared values that the trace does not have: {missing}")

    def _place(self, submission: Submission, data: bytes) -> bytes | None:
        """The declared interventions with their locations, encoded for the workers; `data` is the submission encoded.

        Raises:
            Rejection: one of them cannot be carried out on this model.
        """
        interventions = submission.interventions
        if not interventions:
            return None
        # As with blocks, services send the same ones again and again.
        key = bytes(_interventions.decode(data).interventions) + submission.live
        placed = self._placed.get(key)
        if placed is None:
            live = {name: value.value for name, value in parted(submission.live).items()}
            placed = self._blocks.encode(place(interventions, self._tree, self._info.hidden_size, live))
            if len(key) <= _LONG:
                if len(self._placed) >= _REMEMBERED:
                    self._placed.clear()
                self._placed[key] = placed
        return placed

    def _choose(self, submission: Submission) -> list[Chosen]:
        """The standing interventions of each invoke; nothing if none has any.

        Raises:
            Rejection: it asks for one that does not run here.
        """
        several = len(submission.invokes) > 1
        chosen = [
            self._standing.choose(submission.edits if invoke.edits is None else invoke.edits, field)
            for invoke, field in (
                (invoke, f"invokes[{index}].edits" if several and invoke.edits is not None else "edits")
                for index, invoke in enumerate(submission.invokes)
            )
        ]
        return chosen if any(chosen) else []

    async def _check_source(self, block: Block) -> None:
        models = (block.parameters[0], *(name for name, path in block.paths.items() if not path))
        for name, source, first_line, names in [
            (block.name, block.source, block.first_line, models),
            *((helper.name, helper.source, helper.first_line, ()) for helper in block.helpers),
        ]:
            error, problem = await self._sources.examine(source, names)
            if error is not None:
                kind, number, message = error
                line = None if number is None else number + first_line - 1
                where = "" if line is None else f" at line {line} of {block.filename}"
                raise Rejection("block", f"{name} does not compile{where}: {message}", type=kind, line=line)
            if problem is not None:
                near = f"; the nearest that does is {problem.nearest!r}" if problem.nearest else ""
                raise Rejection(
                    "block",
                    problem.reason or f"module path {problem.path!r} does not exist in {self._info.model}{near}",
                    type="UntappedLocation" if problem.reason else "UnknownModulePath",
                    line=problem.line + first_line - 1,
                )

    # --- the engine's side ------------------------------------------------------------------------------------------

    async def _read_large(self) -> None:
        """Bring large arrays to the bus, and hand on what refers to them when they are there."""
        async for item in self._engine.large():
            if isinstance(item, BlobChunk):
                await self._keep(item)
            else:
                self._reports.take(item)

    async def _keep(self, chunk: BlobChunk) -> None:
        half = self._halves.get(chunk.request)
        if half is None:
            # Its trace has ended without it.
            return
        half.hear()
        self._reports.held_up = True
        try:
            await self._bus.blobs.put(half.trace, chunk.blob, chunk.number, chunk.data, wait=True)
        except BusError:
            # Whoever loads it will find it missing; the others go on.
            logger.exception("a chunk of a large value of trace %s was refused", half.trace)
        finally:
            self._reports.held_up = False
            half.hear()

    async def _renew(self) -> None:
        """Renew the engine's lease, without which it takes nothing: others would take it back at once."""
        asked = anyio.current_time()
        await self._bus.register(self._info, self._settings.lease_s)
        was, self._valid_until = self._valid_until, asked + self._settings.lease_s
        if was <= anyio.current_time():
            # Also where it ran out while it was being renewed: the intake waits for this.
            self._notify()

    async def _heartbeat(self) -> None:
        info = self._info
        while True:
            with anyio.move_on_after(self._settings.heartbeat_s):
                await self._beat.wait()
            if self._engine.lost and not self.lost:
                logger.error("the engine of %s has died", info.engine)
                self.lost = True
                self.stop()
            # Of requests that nobody follows: plain ones.
            self._reports.pull()
            info.running = len(self._runs) + self.plain.running
            info.malformed = self._bus.guard.malformed
            stopping = "holding" if self.holding and self._taking else "serving" if self._taking else "draining"
            info.state = "lost" if self.lost else stopping
            try:
                await self._renew()
            except BusError as error:
                # The engine goes on: what it writes waits for Redis, and its entry comes back with it.
                logger.warning("the registry could not be renewed: %s", error)

    async def _watch_engine(self) -> None:
        """Give the engine up when it has not answered, or reported anything, for too long: its traces are others' then.

        The registry would call an engine alive that hangs: its adapter renews the entry.
        """
        patience_s = self._settings.engine_patience_s
        while True:
            await anyio.sleep(patience_s / _LOOKS)
            if await self._answered(patience_s / _LOOKS):
                continue
            logger.error("engine %s has not answered for %g s, and is given up", self._info.engine, patience_s)
            self.lost = True
            self.stop()
            return

    async def _answered(self, slice_s: float) -> bool:
        """Whether the engine has answered, or reported something, within so many slices of the time."""
        answered = anyio.Event()

        async def ask() -> None:
            with suppress(Exception):
                # Its death is found by whoever renews its entry.
                await self._engine.answers()
            answered.set()

        async with anyio.create_task_group() as asking:
            asking.start_soon(ask)
            reported = self._reports.count
            for _ in range(_LOOKS):
                # Slice by slice: a process that did not run for a while has given its engine no time to answer.
                with anyio.move_on_after(slice_s):
                    await answered.wait()
                if answered.is_set() or self._reports.count != reported:
                    break
            else:
                asking.cancel_scope.cancel()
                return False
            asking.cancel_scope.cancel()
        return True

    async def _look_after_others(self) -> None:
        """See to what nobody else may: clients and engines that are gone, and deadlines.

        It takes as long as there is to do, which must not cost the engine its own entry.
        """
        while True:
            await anyio.sleep(self._settings.heartbeat_s)
            try:
                await self._look_after_claims()
                await self._look_after_own()
                await self._look_after_clients()
                await self._recovery.look(but=self._info.engine)
                await self._bus.sweep([next(self._tags) for _ in range(SWEPT)])
            except BusError as error:
                self._missing.clear()
                logger.warning("clients and engines that are gone could not be looked after: %s", error)


def _patience_of(lease: str) -> float:
    """For how long a lease may be missing before its client is gone, in seconds: a third of what stands in its name."""
    try:
        seconds = float(lease.rpartition(".")[2])
    except ValueError:
        seconds = math.nan
    return min(max(seconds, 1.0), 60.0) / 3 if seconds == seconds else 3.0


def _check_same(declared: bytes, now: bytes) -> None:
    """Live parameters have the names and forms that they were declared with."""
    forms = [{name: value.form for name, value in parted(packed).items()} for packed in (declared, now)]
    if forms[0] != forms[1]:
        raise ValueError(f"they were declared as {forms[0]}, and are {forms[1]}"[:1000])
