"""Recovery of the traces of lost engines.

An engine's entry in the registry is its lease. Engines of a model, and clients that wait for a trace of it, look at
times whether the engines that have taken submissions are still registered (`Recovery`). The traces of a lost engine go
back onto the queue and run as their next attempt. A trace without an attempt left ends as failed, and its submission
becomes a dead letter.

The lost engine need not be dead. An engine that was only slow or cut off finds that a later attempt has its traces
(`trace_records.py`), and Redis refuses its events.
"""

from __future__ import annotations

import logging
import math
import uuid
from typing import Final, Protocol

import anyio

from tracewire_bus.store.engine_registry import EngineRegistry
from tracewire_bus.store.queue_entries import Taken
from tracewire_bus.store.submission_queue import Queue
from tracewire_bus.store.trace_records import Records
from tracewire_bus.wire.messages import Failure

__all__ = ["Recovery", "lost_for_good"]

logger = logging.getLogger("tracewire")

#: How long an engine must be missing to count as lost while Redis has answered for less than `CERTAIN_S`, in seconds.
#: A running engine renews its registry entry in this time.
PATIENCE_S: Final = 3.0
#: Once Redis has answered for so long, a missing engine counts as lost at once, in seconds: longer than its lease.
CERTAIN_S: Final = 8.0
#: After a longer time between two looks, in seconds, `CERTAIN_S` starts again: Redis or this process may have stalled,
#: and running engines may not have been able to renew their entries.
STALL_S: Final = 3.0
#: How long a trace must have waited before `Waiting` is published, in seconds. An engine that was only slow takes its
#: trace again at once and goes on with it, which it could not do after that event.
PUBLISH_AFTER_S: Final = 1.0


class RecoverableBus(Protocol):
    """The part of the bus that a recovery uses."""

    @property
    def queue(self) -> Queue:
        """The queues of all models."""

    @property
    def records(self) -> Records:
        """The records of all traces."""

    @property
    def broken_at(self) -> float:
        """When Redis last failed to answer, by the event loop's clock; `-inf` if never."""

    @property
    def registry(self) -> EngineRegistry:
        """The registry of engines."""


class Recovery:
    """Finds lost engines of one model and puts their traces back onto its queue. Not for concurrent use."""

    def __init__(self, bus: RecoverableBus, model: str) -> None:
        self._bus = bus
        self._model = model
        #: Since when Redis has answered without a stall, and the time of the last look.
        self._since: float | None = None
        self._looked = -math.inf
        #: For each missing engine, since when it is missing.
        self._missing: dict[str, float] = {}
        #: For each trace that was put back: since when it waits, the attempt that is over, and the reason.
        self._waiting: dict[str, tuple[float, int, str]] = {}
        self._who = uuid.uuid4().hex
        #: Whether this process had the role, at the last look, in which one process ends the traces that were given up.
        self.has_role = False

    async def look(self, but: str = "") -> list[str]:
        """Find lost engines, except `but`, and put their traces back onto the queue. Returns the engines' names.

        At the first look, and after Redis did not answer or was slow, an engine counts as lost only when it has been
        missing for some seconds, since running engines may not have been able to renew their entries.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        names = [name for name in await self._bus.queue.holders(self._model) if name != but]
        alive = await self._bus.registry.alive(*names)
        now = anyio.current_time()
        if self._since is None or self._bus.broken_at >= self._since:
            self._since = now
            self._missing.clear()
        elif now - self._looked > STALL_S:
            self._since = now
        self._looked = now
        self._missing = {name: self._missing.get(name, now) for name in names if name not in alive}
        patience = 0.0 if now - self._since >= CERTAIN_S else PATIENCE_S
        gone = [name for name, since in self._missing.items() if now - since >= patience]
        for name in gone:
            why, which = f"engine {name} was lost while it ran this trace", list[tuple[str, int]]()
            back = await self._bus.queue.put_back(self._model, name, why, lost=True, which=which)
            self._waiting |= {trace: (now, attempt, why) for trace, attempt in which}
            del self._missing[name]
            if back:
                logger.warning("engine %s was lost: %d traces of %s wait again", name, back, self._model)
        self.has_role = await self._bus.queue.acquire_role(self._model, "engines" if but else "clients", self._who)
        if gone or self.has_role:
            await self.finish_given_up()
        await self._publish_waiting(now)
        return gone

    async def _publish_waiting(self, now: float) -> None:
        """Publish `Waiting` for the traces that have waited for a while. It only informs readers: no retry."""
        due = {trace: one for trace, one in self._waiting.items() if now - one[0] >= PUBLISH_AFTER_S}
        if not due:
            return
        for trace in due:
            del self._waiting[trace]
        waiting = await self._bus.queue.still_waiting(self._model, list(due))
        by_reason: dict[str, list[tuple[str, int]]] = {}
        for trace in waiting:
            _, attempt, why = due[trace]
            by_reason.setdefault(why, []).append((trace, attempt))
        for why, attempts in by_reason.items():
            await self._bus.records.publish_waiting(attempts, why)

    async def finish_given_up(self) -> None:
        """End the traces that were given up: publish the final event, add the dead letter, settle the queue entry.

        Each step may be repeated, so a process that dies in between leaves nothing undone: the next look goes on.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        for taken in await self._bus.queue.given_up(self._model):
            failure = lost_for_good(taken)
            ended = await self._bus.records.end(taken.trace, "failed", failure)
            if taken.tries > 1 and (ended or await self._bus.records.failed_as(taken.trace) == failure.type):
                await self._bus.queue.dead_letter(self._model, taken, failure.message)
            else:
                await self._bus.queue.done(self._model, taken.trace)


def lost_for_good(taken: Taken) -> Failure:
    """The error of a trace that was given up."""
    why = taken.why or "its engine was lost"
    tried = "" if taken.tries <= 1 else f"it was tried {taken.lost} times, and each time its engine was lost; "
    return Failure(type="EngineLost", message=f"{tried}{why}")
