"""Answers queue entries that cannot run: on the trace's own stream, or as a dead letter.

A refusal ends a trace, so it must be an answer to the trace's own entry. Each client that may write to the queue can
put an entry under the id of any trace. And an engine that was slow can still have an entry that another engine has by
now.
"""

from __future__ import annotations

import logging
import time

import anyio

from tracewire_bus.bus import Bus, Fenced, Taken
from tracewire_bus.domain.limits import MAX_TRACE_ID
from tracewire_bus.store.lifecycle import lifecycle_fields
from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.messages import EngineInfo, Failure, Final

from .claims import Claims
from .gate import Admitted
from .trace_run import RunServices, TraceRun

__all__ = ["Refusals"]

logger = logging.getLogger("tracewire")

#: How long an engine that has put its traces back takes to leave the registry, and how often to look, in seconds.
_HANDOVER_S, _LOOK_S = 10.0, 0.5


class Refusals:
    """The refusals of one engine."""

    def __init__(self, bus: Bus, services: RunServices, claims: Claims) -> None:
        self._bus = bus
        self._writer = services.writer
        self._info: EngineInfo = services.info
        self._claims = claims

    async def refuse(self, entry: Taken, trace: str, failure: Failure, admitted: Admitted | None) -> None:
        """Answer an entry that cannot run on its trace's stream. Without a stream of its own it is a dead letter.

        The entry of a trace that another engine runs as this attempt or a later one goes to that engine.

        Args:
            entry: the entry.
            trace: the trace that it names.
            failure: why it cannot run.
            admitted: what was verified of it; None if its content was refused before, or at that.

        Raises:
            BusError: Redis refuses, or does not answer.
        """
        named = 0 < len(trace) <= MAX_TRACE_ID and "\ufffd" not in trace
        if named and await self._is_its_own(entry, trace, admitted):
            await self._reject(entry, trace, failure)
        elif named and (runs := await self._runs_elsewhere(entry, trace, admitted)) is not None:
            await self._hand_over(entry, trace, *runs)
        else:
            logger.warning("dead-lettering entry %r: %s", entry.trace, failure.message)
            await self._bus.queue.dead_letter(self._info.model, entry, failure.message, self._info.engine)

    async def _is_its_own(self, entry: Taken, trace: str, admitted: Admitted | None) -> bool:
        """Whether an entry may end the trace that it names. An entry beside the trace's own must not end the trace."""
        run = self._claims.runs.get(trace)
        if isinstance(run, TraceRun) and run.attempt >= entry.attempt:
            return False
        until = anyio.current_time() + _HANDOVER_S
        while True:
            holder = await self._bus.records.holder(trace)
            if holder is None:
                return True
            model, engine, attempt = holder
            if model != self._info.model or not (attempt < entry.attempt or engine == self._info.engine):
                return False
            # A number of attempts proves nothing: everybody who can write to the queue can write it.
            if await self._is_proven(trace, admitted) or not await self._is_running(trace, engine):
                return True
            if engine == self._info.engine or anyio.current_time() >= until:
                return False
            # That engine may be leaving: it puts its traces back before it leaves the registry.
            await anyio.sleep(_LOOK_S)

    async def _runs_elsewhere(self, entry: Taken, trace: str, admitted: Admitted | None) -> tuple[str, int] | None:
        """The other engine that runs the trace of a verified entry, and its attempt: this one or a later one.

        The queue's server has forgotten that that engine has the entry: it took over from another server.
        """
        holder = await self._bus.records.holder(trace)
        if holder is None or not await self._is_proven(trace, admitted):
            return None
        model, engine, attempt = holder
        known = engine not in ("", self._info.engine)
        return (engine, attempt) if model == self._info.model and known and entry.attempt <= attempt else None

    async def _hand_over(self, entry: Taken, trace: str, engine: str, attempt: int) -> None:
        """Give an entry to the engine that runs its trace. If that engine is lost, the trace runs again."""
        model, queue, records = self._info.model, self._bus.queue, self._bus.records
        logger.warning("engine %s runs trace %s; it gets the entry that the queue gave to this engine", engine, trace)
        await queue.hand_over(model, entry, self._info.engine, to=engine, attempt=attempt)
        # That engine may have ended its run, or left it, while it did not have the entry.
        if await records.ended(trace):
            await queue.done(model, entry.trace, engine, attempt)
        elif await records.is_left(trace):
            why = f"engine {engine} no longer runs it"
            await queue.put_back(model, engine, why, lost=False, trace=entry.trace, attempt=attempt)

    async def _is_proven(self, trace: str, admitted: Admitted | None) -> bool:
        """Whether an entry was signed by the key that has submitted the trace, where signatures count."""
        if admitted is None or admitted.key is None:
            return admitted is not None
        return await self._bus.records.submitter(trace) in ("", admitted.key.id)

    async def _is_running(self, trace: str, engine: str) -> bool:
        """Whether a trace runs on the engine that has begun it last."""
        if engine == self._info.engine:
            return trace in self._claims.runs
        if not engine or await self._bus.records.is_left(trace):
            return False
        return bool(await self._bus.registry.alive(engine))

    async def _reject(self, entry: Taken, trace: str, failure: Failure) -> None:
        final = Final(attempt=entry.attempt, seq=0, status="rejected", error=failure, time=time.time())
        settled = (self._info.model, entry.trace, self._info.engine, entry.attempt)
        try:
            life = lifecycle_fields(
                "final",
                trace,
                model=self._info.model,
                engine=self._info.engine,
                attempt=entry.attempt,
                status=final.status,
                error=failure.type,
                usage=final.usage,
            )
            await self._writer.append(
                trace, entry.attempt, 0, encode(final), final=True, settles=settled, lifecycle=life
            )
        except Fenced:
            logger.warning("trace %s has ended already; its rejection was dropped", trace)
            self._bus.queue.note_settled(self._info.model, entry.trace)
