"""What becomes of the traces of an engine that has gone.

An engine's entry in the registry is its lease. Whoever serves or waits for a model looks at times whether those that
have taken its submissions are there still (`Recovery`). What a lost one had waits
again, and runs as its next attempt; what had no try left is ended, and kept as a dead letter.

Nothing rests on the lost engine's being dead. One that was only slow, or cut off, finds its traces taken by number
(`trace_records.py`) and its events refused by the stream.
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

#: How long an engine must be missing for one who cannot tell whether Redis itself was away, in seconds. One that lives
#: has renewed its entry by then.
PATIENCE_S: Final = 3.0
#: For how long Redis must have answered for an absence to be proof, in seconds: longer than an engine's lease.
CERTAIN_S: Final = 8.0
#: What may lie between two looks, in seconds, for the second to be such proof. In more, Redis may have kept everybody
#: waiting without a word, or we alone looked away: others had no time to renew what ran out meanwhile.
STALL_S: Final = 3.0
#: For how long what waits again must have done so before its readers are told, in seconds. An engine that was only slow
#: takes it again at once, and goes on with it: it could not behind that word.
TOLD_S: Final = 1.0


class RecoverableBus(Protocol):
    """What a recovery needs of the bus."""

    @property
    def queue(self) -> Queue:
        """The models' queues."""

    @property
    def records(self) -> Records:
        """The traces' records."""

    @property
    def broken_at(self) -> float:
        """When Redis last failed to answer, by the event loop's clock; `-inf` if never."""

    @property
    def registry(self) -> EngineRegistry:
        """The engines that serve."""


class Recovery:
    """Looks after the submissions of one model that engines have taken. Not for concurrent use."""

    def __init__(self, bus: RecoverableBus, model: str) -> None:
        self._bus = bus
        self._model = model
        self._since: float | None = None
        self._looked = -math.inf
        self._missing: dict[str, float] = {}
        #: What waits again, and since when, by trace: the attempt that is over, and why it waits.
        self._again: dict[str, tuple[float, int, str]] = {}
        self._who = uuid.uuid4().hex
        #: Whether, as of the last look, this one of all that look sees to what is taken by nobody that lives.
        self.has_role = False

    async def look(self, but: str = "") -> list[str]:
        """Find the engines that are gone, except `but`, and let what they had wait again. Returns their names.

        After Redis was away or slow, or when it is first asked, it takes an engine for gone only when it stays missing
        for some seconds: entries in the registry may have run out with nobody able to renew them.

        Raises:
            BusUnavailable: Redis stayed away.
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
            self._again |= {trace: (now, attempt, why) for trace, attempt in which}
            del self._missing[name]
            if back:
                logger.warning("engine %s has gone: %d traces of %s wait again", name, back, self._model)
        self.has_role = await self._bus.queue.acquire_role(self._model, "engines" if but else "clients", self._who)
        if gone or self.has_role:
            await self.finish_given_up()
        await self._tell(now)
        return gone

    async def _tell(self, now: float) -> None:
        """Tell the readers of what has waited for a while that it does. Nothing rests on it: it is not repeated."""
        due = {trace: one for trace, one in self._again.items() if now - one[0] >= TOLD_S}
        if not due:
            return
        for trace in due:
            del self._again[trace]
        waiting = await self._bus.queue.still_waiting(self._model, list(due))
        by_reason: dict[str, list[tuple[str, int]]] = {}
        for trace in waiting:
            _, attempt, why = due[trace]
            by_reason.setdefault(why, []).append((trace, attempt))
        for why, attempts in by_reason.items():
            await self._bus.records.wait(attempts, why)

    async def finish_given_up(self) -> None:
        """End what was given up.

        Each step may be repeated, so that whoever does it may die anywhere: the end, then the dead letter, then the
        entry.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        for taken in await self._bus.queue.given_up(self._model):
            failure = lost_for_good(taken)
            ended = await self._bus.records.end(taken.trace, "failed", failure)
            if taken.tries > 1 and (ended or await self._bus.records.failed_as(taken.trace) == failure.type):
                await self._bus.queue.dead_letter(self._model, taken, failure.message)
            else:
                await self._bus.queue.done(self._model, taken.trace)


def lost_for_good(taken: Taken) -> Failure:
    """What a trace ends with whose engines were lost as often as it may be tried."""
    why = taken.why or "its engine was lost"
    tried = "" if taken.tries <= 1 else f"it was tried {taken.lost} times, and each time its engine was lost; "
    return Failure(type="EngineLost", message=f"{tried}{why}")
