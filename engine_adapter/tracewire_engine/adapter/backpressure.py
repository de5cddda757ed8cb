"""Backpressure: slows traces, or the engine, when the engine makes events faster than Redis takes them.

The adapter counts the bytes that wait for Redis: the events that Redis has not acknowledged, the workers' reports, and
vLLM's outputs that wait for their turn. It first slows the traces whose own events wait, each by the submission's
`on_lag`: `"hold"` pauses the trace's requests in the engine, `"thin"` leaves out the reads of declared interventions,
`"spill"` puts all saves into the bulk store, and these two pause the requests only if that is not enough. Other traces
run on. Only when more than `buffer_bytes` wait in all does the adapter pause the whole engine.
"""

from __future__ import annotations

import logging
import time
from typing import Final

import anyio

from tracewire_bus.bus import Writer
from tracewire_bus.wire.messages import Failure

from .claims import Claims
from .engine_api import Engine, EngineLost
from .lifecycle import Lifecycle
from .pending import PendingRecords
from .report_router import ReportRouter

__all__ = ["Backpressure"]

logger = logging.getLogger("tracewire")

#: How often the adapter checks how much waits for Redis, in seconds.
CHECK_S = 0.05
#: The pause before the adapter repeats a failed call that pauses or resumes the engine, in seconds.
RETRY_S = 1.0
#: The part of `buffer_bytes` that the running traces share equally.
_SHARED: Final = 0.5
#: The least share of a trace, in bytes.
_LEAST_SHARE: Final = 1 << 20
#: For how long the engine is paused although nothing is on its way to Redis, before a trace is ended, in seconds.
STUCK_S: Final = 5.0

_AHEAD = Failure(
    type="EngineError",
    message="the saves that were reported of tokens which the model has not sampled fill the adapter's buffer",
    field="block",
)


class Backpressure:
    """Compares the bytes that wait for Redis with `buffer_bytes`, and slows traces or the engine down."""

    def __init__(
        self,
        engine: Engine,
        writer: Writer,
        reports: ReportRouter,
        pending: dict[str, PendingRecords],
        claims: Claims,
        lifecycle: Lifecycle,
        buffer_bytes: int,
    ) -> None:
        self._engine = engine
        self._writer = writer
        self._reports = reports
        self._pending = pending
        self._claims = claims
        self._lifecycle = lifecycle
        self._most = buffer_bytes
        #: Since when the paused engine has nothing on its way to Redis, by `time.monotonic`.
        self._stuck_since: float | None = None

    async def run(self) -> None:
        """Check every `CHECK_S` seconds. Never ends by itself."""
        async with anyio.create_task_group() as group:
            while True:
                await anyio.sleep(CHECK_S)
                if not self._lifecycle.engine_paused and not self._claims.runs:
                    continue
                # Reports in the link count as unpublished, too.
                self._reports.pull()
                await self._slow_traces(group)
                await self._slow_engine()
                await self._end_stuck()

    async def _slow_traces(self, group: anyio.abc.TaskGroup) -> None:
        runs = list(self._claims.running())
        share = max(int(self._most * _SHARED / max(1, len(runs))), min(_LEAST_SHARE, self._most))
        for run in runs:
            if not run.lag.slowed and run.lag.nbytes <= share:
                continue
            try:
                event = await run.lag.check(share)
            except EngineLost as error:
                logger.debug("trace %s was neither slowed nor resumed: %s", run.trace, error)
                continue
            except Exception as error:  # an engine that is shutting down raises errors of any type
                logger.warning("trace %s was neither slowed nor resumed: %s", run.trace, error)
                continue
            if event is not None:
                # The event waits for Redis like any other.
                group.start_soon(run.publish_lag, event)

    @property
    def waiting_bytes(self) -> int:
        """How many bytes of events and saves wait for Redis."""
        waiting = self._writer.backlog + sum(pending.nbytes for pending in self._pending.values())
        return waiting + sum(run.lag.output_bytes for run in self._claims.running())

    async def _end_stuck(self) -> None:
        """End the trace with the most reports that wait for tokens, if these keep the engine paused.

        A paused engine makes no tokens. A process of blocks can report saves of tokens that are far ahead.
        """
        runs = list(self._claims.running())
        late = self._writer.backlog or self._reports.held_up or any(run.lag.output_bytes for run in runs)
        now = time.monotonic()
        if not self._lifecycle.engine_paused or late or not runs:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = now
        elif now - self._stuck_since > STUCK_S:
            self._stuck_since = None
            run = max(runs, key=lambda run: run.lag.nbytes)
            if run.end("failed", _AHEAD):
                logger.warning("trace %s keeps the engine paused, and is ended: %s", run.trace, _AHEAD.message)
                try:
                    await run.abort_all()
                except Exception as error:  # an engine that is shutting down raises errors of any type
                    logger.warning("trace %s could not be ended: %s", run.trace, error)

    async def _slow_engine(self) -> None:
        """Pause the whole engine while more than `buffer_bytes` wait, until half of that is left."""
        lifecycle, waiting = self._lifecycle, self.waiting_bytes
        paused = lifecycle.engine_paused
        if paused == (waiting > (self._most // 2 if paused else self._most)):
            return
        lifecycle.engine_paused = not paused
        try:
            if lifecycle.engine_paused:
                logger.warning("%d bytes wait for Redis: the engine is paused", waiting)
                await self._engine.pause_all()
            else:
                logger.warning("Redis has taken most of the events that waited: the engine is resumed")
                await self._engine.resume_all()
        except EngineLost as error:
            logger.debug("the engine was neither paused nor resumed: %s", error)
        except Exception as error:  # an engine that is shutting down raises errors of any type
            lifecycle.engine_paused = paused
            logger.warning("the engine was neither paused nor resumed: %s", error)
            await anyio.sleep(RETRY_S)
        lifecycle.notify()
