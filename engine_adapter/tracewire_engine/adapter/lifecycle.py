"""The state of an adapter: whether it serves, takes new traces or exits, and by when it must exit."""

from __future__ import annotations

import logging
import math

import anyio

__all__ = ["Lifecycle"]

logger = logging.getLogger("tracewire")


class Lifecycle:
    """The state of one adapter, which serves as `engine`, and the event that wakes tasks when it changes."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        #: Set when the registry has the engine.
        self.serving = anyio.Event()
        #: Set when the adapter stops taking new traces.
        self.stopping = anyio.Event()
        #: Set when the adapter was asked on the bus to leave for good: the supervisor does not start it again.
        self.draining = anyio.Event()
        #: By when running traces must end, by the event loop's clock.
        self.until = math.inf
        #: Until when this engine's registry entry is valid, at least, by the event loop's clock.
        self.valid_until = -math.inf
        #: Whether the engine is paused as a whole until Redis has taken more.
        self.engine_paused = False
        #: Whether the engine died under the adapter.
        self.lost = False
        self._changed = anyio.Event()

    def stop(self, within_s: float) -> None:
        """Take no new traces, and end running ones in `within_s` seconds. Of several calls the earliest end counts."""
        self.until = min(self.until, anyio.current_time() + within_s)
        self.stopping.set()
        self.notify()

    def drain(self, within_s: float | None) -> None:
        """Stop for good, when running traces have ended, or after `within_s` seconds if that is given."""
        if not self.draining.is_set():
            within = "" if within_s is None else f", within {within_s:g} s"
            logger.info("engine %s was asked to drain%s", self._engine, within)
            self.draining.set()
        self.stop(math.inf if within_s is None else within_s)

    def give_up(self) -> None:
        """Stop because the engine is lost. Its traces wait for other engines."""
        self.lost = True
        self.stop(0)

    def notify(self) -> None:
        """Wake the tasks that wait for a change of this state, or for room for another trace."""
        self._changed.set()
        self._changed = anyio.Event()

    async def changed(self) -> None:
        """Wait for the next `notify`."""
        await self._changed.wait()
