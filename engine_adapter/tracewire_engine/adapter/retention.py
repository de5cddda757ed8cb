"""Retention: trims the streams of running traces that exceed their limit, and drops finished traces.

Each run counts what it publishes. When that passes a limit, one task, over connections of its own, has the bus write a
snapshot of the trace's state and trim its stream (`tracewire_bus/snapshots.py`). Nobody who publishes waits for it.

`FinishedRetention` looks at times how much all finished traces take,
and drops the oldest that are beyond what is to be kept in all (`tracewire_bus/finished.py`).

A snapshot costs what the state takes. So that all of a trace's snapshots together cost no more than a few times what
the trace publishes, a stream whose state is large is trimmed only when it has a quarter of its state's bytes.
"""

from __future__ import annotations

import logging
from collections import deque

import anyio

from tracewire_bus.bus import Bus, BusError
from tracewire_bus.store.snapshots import Snapshots
from tracewire_bus.transport.tasks import Signal

__all__ = ["FinishedRetention", "Retention", "Tally"]

logger = logging.getLogger("tracewire")

#: How long to let Redis be after it failed, in seconds.
_PAUSE_S = 1.0


class Tally:
    """The size of one attempt of a trace on its stream: events, and encoded bytes."""

    __slots__ = ("_asked", "_retention", "attempt", "events", "nbytes", "over", "state", "trace")

    def __init__(self, retention: Retention, trace: str, attempt: int) -> None:
        self._retention = retention
        self.trace = trace
        self.attempt = attempt
        self.events = 0
        self.nbytes = 0
        #: Bytes of the last snapshot.
        self.state = 0
        #: Whether nothing is to be trimmed any more.
        self.over = False
        self._asked = False

    def add(self, nbytes: int) -> None:
        """An event of so many bytes is on its way to the stream."""
        self.events += 1
        self.nbytes += nbytes
        if not self._asked and not self.over and self._retention.exceeded(self):
            self._asked = True
            self._retention.ask(self)

    def trimmed(self) -> None:
        """The run was served, and may ask again."""
        self._asked = False


class Retention:
    """Keeps streams to about `events` events and `nbytes` encoded bytes each; 0: any number."""

    def __init__(self, snapshots: Snapshots, events: int, nbytes: int) -> None:
        self._snapshots = snapshots
        self._events = events
        self._nbytes = nbytes
        self._due: deque[Tally] = deque()
        self._wanted = Signal()

    def tally(self, trace: str, attempt: int) -> Tally | None:
        """The counter of a run, if there is a limit."""
        return Tally(self, trace, attempt) if self._events or self._nbytes else None

    def exceeded(self, tally: Tally) -> bool:
        """Whether a stream is to be trimmed."""
        beyond = 0 < self._events < tally.events or 0 < self._nbytes < tally.nbytes
        return beyond and tally.nbytes >= tally.state // 4

    def ask(self, tally: Tally) -> None:
        """Have a stream trimmed soon."""
        self._due.append(tally)
        self._wanted.notify()

    async def run(self) -> None:
        """Trim what is due, one stream after the other, for ever."""
        while True:
            while not self._due:
                await self._wanted.wait()
            tally = self._due.popleft()
            if not tally.over:
                await self._trim(tally)
                tally.trimmed()

    async def _trim(self, tally: Tally) -> None:
        try:
            trimmed = await self._snapshots.take(tally.trace, tally.attempt)
        except BusError as error:
            logger.warning("the stream of trace %s could not be trimmed: %s", tally.trace, error)
            await anyio.sleep(_PAUSE_S)
            return
        except Exception:  # the trace runs on, whatever its stream holds
            logger.exception("the stream of trace %s cannot be trimmed, and grows", tally.trace)
            tally.over = True
            return
        if trimmed is not None:
            tally.events -= trimmed.entries
            tally.nbytes -= trimmed.nbytes
            tally.state = trimmed.state
            logger.debug("trace %s: trimmed to what follows %s", tally.trace, trimmed.id)


class FinishedRetention:
    """Keeps all finished traces together to `traces` and to `nbytes` of what they take in Redis; 0: any number.

    Engines take turns, as `engine`: one of them looks every `every_s` seconds. Where their bounds differ, the least
    counts.
    """

    def __init__(self, bus: Bus, engine: str, traces: int, nbytes: int, every_s: float) -> None:
        self._bus = bus
        self._engine = engine
        self._traces = traces
        self._nbytes = nbytes
        self._every_s = every_s

    async def run(self) -> None:
        """Drop what is too much, for ever; nothing where there is no bound."""
        while self._traces or self._nbytes:
            # Its own turn may not come again before it looks again.
            await anyio.sleep(self._every_s)
            try:
                finished = self._bus.finished
                if not await finished.acquire_turn(self._engine, max(1, round(self._every_s * 900))):
                    continue
                dropped = await finished.drop_beyond(self._traces, self._nbytes)
            except BusError as error:
                logger.warning("finished traces could not be looked after: %s", error)
                await anyio.sleep(_PAUSE_S)
                continue
            if dropped:
                logger.info("dropped the %d oldest finished traces", dropped)
