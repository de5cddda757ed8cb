"""Retention: trims the streams of running traces that exceed their limit, and drops finished traces.

Each run counts the events that it publishes. When they exceed a limit, one task with connections of its own has the
bus write a snapshot of the trace's state and trim its stream (`tracewire_bus/store/snapshots.py`). Publishing does not
wait for that.

`FinishedRetention` regularly checks how much all finished traces take, and drops the oldest beyond the limit
(`tracewire_bus/store/finished.py`).

The cost of a snapshot grows with the size of the state. All snapshots of a trace together should cost no more than a
few times its events. So a stream is trimmed only when its events take at least a quarter of the bytes of its state.
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

#: How long to wait after an error of Redis, in seconds.
_PAUSE_S = 1.0


class Tally:
    """Counts the events and encoded bytes of one attempt on its trace's stream."""

    __slots__ = ("_asked", "_retention", "attempt", "events", "nbytes", "over", "state", "trace")

    def __init__(self, retention: Retention, trace: str, attempt: int) -> None:
        self._retention = retention
        self.trace = trace
        self.attempt = attempt
        self.events = 0
        self.nbytes = 0
        #: Bytes of the last snapshot.
        self.state = 0
        #: Whether the stream must not be trimmed again.
        self.over = False
        self._asked = False

    def add(self, nbytes: int) -> None:
        """Count an event of `nbytes` bytes that is queued for the stream."""
        self.events += 1
        self.nbytes += nbytes
        if not self._asked and not self.over and self._retention.exceeded(self):
            self._asked = True
            self._retention.ask(self)

    def trimmed(self) -> None:
        """Note that the stream was looked at, so that the run may ask again."""
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
        """The counter of a run; `None` if there is no limit."""
        return Tally(self, trace, attempt) if self._events or self._nbytes else None

    def exceeded(self, tally: Tally) -> bool:
        """Whether a stream exceeds a limit and is worth trimming."""
        beyond = 0 < self._events < tally.events or 0 < self._nbytes < tally.nbytes
        return beyond and tally.nbytes >= tally.state // 4

    def ask(self, tally: Tally) -> None:
        """Queue a stream for trimming."""
        self._due.append(tally)
        self._wanted.notify()

    async def run(self) -> None:
        """Trim the queued streams, one after the other. Never ends by itself."""
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
        except Exception:  # the trace goes on, even if its stream cannot be read
            logger.exception("the stream of trace %s cannot be trimmed, and grows", tally.trace)
            tally.over = True
            return
        if trimmed is not None:
            tally.events -= trimmed.entries
            tally.nbytes -= trimmed.nbytes
            tally.state = trimmed.state
            logger.debug("trace %s: trimmed to the events after %s", tally.trace, trimmed.id)


class FinishedRetention:
    """Limits all finished traces together to `traces` traces and `nbytes` bytes of Redis; 0 for no limit.

    One of the engines looks every `every_s` seconds; they take turns. `engine` is this one's id. If their limits
    differ, the lowest counts.
    """

    def __init__(self, bus: Bus, engine: str, traces: int, nbytes: int, every_s: float) -> None:
        self._bus = bus
        self._engine = engine
        self._traces = traces
        self._nbytes = nbytes
        self._every_s = every_s

    async def run(self) -> None:
        """Drop finished traces beyond the limits. Never ends by itself if there is a limit."""
        while self._traces or self._nbytes:
            # The lock of a turn expires a little before this engine's next look.
            await anyio.sleep(self._every_s)
            try:
                finished = self._bus.finished
                if not await finished.acquire_turn(self._engine, max(1, round(self._every_s * 900))):
                    continue
                dropped = await finished.drop_beyond(self._traces, self._nbytes)
            except BusError as error:
                logger.warning("could not check how much finished traces take: %s", error)
                await anyio.sleep(_PAUSE_S)
                continue
            if dropped:
                logger.info("dropped the %d oldest finished traces", dropped)
