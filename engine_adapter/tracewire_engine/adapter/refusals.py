"""Answers queue entries that cannot run: on the trace's own stream, or as a dead letter.

A refusal ends a trace, so it must be an answer to the trace's own entry. Each client that may write to the queue can
put an entry under the id of any trace. And an engine that was slow can still have an entry that another engine has by
now.
"""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

import anyio
import msgspec

from tracewire_bus.bus import Bus, BusError, Fenced, Taken
from tracewire_bus.domain.limits import MAX_TRACE_ID
from tracewire_bus.store.lifecycle import lifecycle_fields
from tracewire_bus.transport.tasks import Signal
from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.messages import EngineInfo, Failure, Final

from .claims import Claims
from .gate import Admitted
from .trace_run import RunServices, TraceRun

__all__ = ["Refusals"]

logger = logging.getLogger("tracewire")

#: How long an engine that has put its traces back takes to leave the registry, and how often to look, in seconds.
_HANDOVER_S, _LOOK_S = 10.0, 0.5
#: How many entries wait for that at most. Further ones are dead letters at once.
_MOST_UNDECIDED = 256


class _Undecided(NamedTuple):
    """An entry, without its data, of a trace of a live engine; the trace, the refusal, and until when it waits."""

    entry: Taken
    trace: str
    failure: Failure
    until: float


class Refusals:
    """The refusals of one engine."""

    def __init__(self, bus: Bus, services: RunServices, claims: Claims) -> None:
        self._bus = bus
        self._writer = services.writer
        self._info: EngineInfo = services.info
        self._claims = claims
        #: The entries that wait for another engine to leave, or for their time, by the trace's name in the queue.
        self._undecided: dict[str, _Undecided] = {}
        self._new = Signal()

    async def refuse(self, entry: Taken, trace: str, failure: Failure, admitted: Admitted | None) -> None:
        """Answer an entry that cannot run on its trace's stream. Without a stream of its own it is a dead letter.

        The entry of a trace that another engine runs as this attempt or a later one goes to that engine. If another
        engine runs the trace that an unverified entry names, the entry waits: `run` answers it.

        Args:
            entry: the entry.
            trace: the trace that it names.
            failure: why it cannot run.
            admitted: what was verified of it; None if its content was refused before, or at that.

        Raises:
            BusError: Redis refuses, or does not answer.
        """
        named = 0 < len(trace) <= MAX_TRACE_ID and "\ufffd" not in trace
        own = await self._is_its_own(entry, trace, admitted) if named else False
        if own is None and len(self._undecided) < _MOST_UNDECIDED:
            fields = {name: value for name, value in entry.fields.items() if name != b"d"}
            until = anyio.current_time() + _HANDOVER_S
            self._undecided[entry.trace] = _Undecided(
                msgspec.structs.replace(entry, fields=fields), trace, failure, until
            )
            self._new.notify()
        elif own:
            await self._reject(entry, trace, failure)
        elif named and (runs := await self._runs_elsewhere(entry, trace, admitted)) is not None:
            await self._hand_over(entry, trace, *runs)
        else:
            await self._dead_letter(entry, failure)

    async def run(self) -> None:
        """Answer the entries that wait. Never ends by itself."""
        while True:
            while not self._undecided:
                await self._new.wait()
            await anyio.sleep(_LOOK_S)
            for name, one in list(self._undecided.items()):
                try:
                    if not await self._decide(one):
                        continue
                except BusError as error:
                    # The entry is still held by this engine.
                    logger.warning("queue entry %s could not be answered: %s", name, error)
                    continue
                except Exception:  # a defect of the adapter must not stop the other entries
                    logger.exception("queue entry %s could not be answered", name)
                if self._undecided.get(name) is one:
                    del self._undecided[name]

    async def _decide(self, one: _Undecided) -> bool:
        """Answer an entry that waits, or return False if it is to wait on."""
        own = await self._is_its_own(one.entry, one.trace, None)
        if own is None and anyio.current_time() < one.until:
            return False
        if own:
            await self._reject(one.entry, one.trace, one.failure)
        else:
            await self._dead_letter(one.entry, one.failure)
        return True

    async def _dead_letter(self, entry: Taken, failure: Failure) -> None:
        logger.warning("dead-lettering entry %r: %s", entry.trace, failure.message)
        await self._bus.queue.dead_letter(self._info.model, entry, failure.message, self._info.engine)

    async def _is_its_own(self, entry: Taken, trace: str, admitted: Admitted | None) -> bool | None:
        """Whether an entry may end the trace that it names; None if another engine runs the trace, and may be leaving.

        An entry beside the trace's own must not end the trace.
        """
        run = self._claims.runs.get(trace)
        if isinstance(run, TraceRun) and run.attempt >= entry.attempt:
            return False
        holder = await self._bus.records.holder(trace)
        if holder is None:
            return True
        model, engine, attempt = holder
        if model != self._info.model or not (attempt < entry.attempt or engine == self._info.engine):
            return False
        # A number of attempts proves nothing: everybody who can write to the queue can write it.
        if await self._is_proven(trace, admitted) or not await self._is_running(trace, engine):
            return True
        # Another engine may be leaving: it puts its traces back before it leaves the registry.
        return False if engine == self._info.engine else None

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
