"""Ends pauses whose time is over, so that a client that dies with a trace paused does not hold the trace for ever."""

from __future__ import annotations

import logging
from typing import Final

import anyio

from tracewire_bus.bus import Bus, BusError
from tracewire_bus.store.trace_records import cancellation, unpause_command
from tracewire_bus.transport.backoff import Backoff

from .claims import Claims
from .control import Control
from .trace_run import TraceRun

__all__ = ["PauseEnds"]

logger = logging.getLogger("tracewire")

#: How often paused traces are looked at, in seconds.
_CHECK_S: Final = 0.1
#: How long after a pause's end an order that Redis has accepted may take to the engine, in seconds.
_ORDER_S: Final = 5.0


class PauseEnds:
    """Resumes or cancels each paused run of one engine when its pause ends, as the pause's author has asked."""

    def __init__(self, bus: Bus, claims: Claims, control: Control) -> None:
        self._bus = bus
        self._claims = claims
        self._control = control

    async def run(self) -> None:
        """Look every `_CHECK_S` seconds. Never ends by itself."""
        backoff = Backoff()
        while True:
            await anyio.sleep(_CHECK_S)
            try:
                await self.check(anyio.current_time())
                backoff.reset()
            except BusError as error:
                logger.log(backoff.level, "pauses whose time is over wait for Redis: %s", error)
                await anyio.sleep(backoff.next())

    async def check(self, now: float) -> None:
        """End the pauses that are due at the time `now`, in seconds of the event loop's clock.

        Raises:
            BusError: Redis does not answer, or refuses. A later call goes on.
        """
        for run in list(self._claims.running()):
            pause = run.pause
            if pause.due is not None and pause.due <= now and not run.ended:
                await self._end(run, now)

    async def _end(self, run: TraceRun, now: float) -> None:
        pause = run.pause
        author, due = f"timeout of {pause.wanted_by}", pause.due
        assert due is not None
        command = unpause_command(self._bus.keys, run.trace, pause.number, cancels=pause.cancels)
        number = int(await self._bus.command(*command))
        if pause.due != due:
            # An order that came meanwhile has set another time, or none.
            return
        if not number and now < due + _ORDER_S:
            # The order that has ended or replaced the pause is on its way. If none comes, the engine has refused it.
            return
        pause.due = None
        if pause.cancels:
            self._control.end(run, "cancelled", cancellation(author, "its pause was not ended in time"))
        else:
            pause.request(author, resume=True, number=number)
            self._control.apply_pause(run)
