"""Ends the traces that lost clients and engines left behind.

These are the traces of clients whose leases are missing, attempts that another engine has overtaken, engines that died,
and traces past their deadline that no engine runs.
"""

from __future__ import annotations

import itertools
import logging
import math
import os

import anyio

from tracewire_bus.bus import Bus, BusError
from tracewire_bus.recovery import Recovery
from tracewire_bus.store.keys import TAGS
from tracewire_bus.store.trace_records import cancellation
from tracewire_bus.wire.messages import EngineInfo, Failure

from .claims import Claims
from .control import Control
from .trace_run import TraceRun

__all__ = ["LeaseWatch"]

logger = logging.getLogger("tracewire")

#: For how many of the traces' hash tags each heartbeat ends traces past their deadline that no engine runs.
SWEPT = TAGS // 8
#: If a heartbeat is later than this, in seconds, the wait for missing leases starts again.
_STALL_S = 1.0


class LeaseWatch:
    """Looks for missing clients and engines every `every_s` seconds, on behalf of one engine."""

    def __init__(
        self, bus: Bus, info: EngineInfo, claims: Claims, control: Control, recovery: Recovery, every_s: float
    ) -> None:
        self._bus = bus
        self._info = info
        self._claims = claims
        self._control = control
        self._recovery = recovery
        self._every_s = every_s
        #: Since when the lease of a client with running or waiting traces has been missing.
        self._missing: dict[str, float] = {}
        #: The number of each run's last event at the last look.
        self._last_seq: dict[TraceRun, int] = {}
        #: When leases were last looked for.
        self._looked = -math.inf
        self._tags = itertools.cycle(bus.keys.tags[os.getpid() % TAGS :] + bus.keys.tags[: os.getpid() % TAGS])

    async def end_overtaken(self) -> None:
        """End runs whose traces other engines have ended or begun since.

        A run that writes to its stream finds that out by itself, but a paused run does not write.
        """
        engine, was = self._info.engine, self._last_seq
        runs = [run for run in self._claims.running() if not run.ended]
        self._last_seq = {run: run.seq for run in runs}
        quiet = [run for run in runs if was.get(run) == run.seq]
        theirs = await self._bus.records.overtaken(engine, [(run.trace, run.attempt) for run in quiet])
        for run, over in zip(quiet, theirs, strict=True):
            # The trace's stream refuses this failure's final event, so no client sees it.
            lost = Failure(type="EngineLost", message="another engine has ended or begun it since")
            if over and self._control.end(run, "failed", lost):
                logger.warning("trace %s was taken from this engine: its attempt %d ends", run.trace, run.attempt)

    async def end_abandoned(self) -> None:
        """End the traces of clients whose leases have been missing for longer than a live client takes to renew one."""
        running: dict[str, list[TraceRun]] = {}
        for run in self._claims.running():
            if run.lease:
                running.setdefault(run.lease, []).append(run)
        # Only one of the engines looks at waiting traces.
        cares = self._recovery.has_role
        waiting = {lease for lease in await self._bus.queue.leases(self._info.model) if lease} if cares else set()
        leases = [*running, *(waiting - running.keys())]
        held = await self._bus.leases.held(leases)
        now = anyio.current_time()
        if now - self._looked > self._every_s + _STALL_S:
            # Redis did not answer, or this process did not run. The same may hold for the clients.
            self._missing.clear()
        self._looked = now
        self._missing = {lease: self._missing.get(lease, now) for lease in leases if lease not in held}
        if waiting & held:
            # A process that withdrew the entries of a lease may have ended before it had ended their traces.
            for lease in held.intersection(await self._bus.queue.withdrawn(self._info.model)):
                await self._bus.queue.reinstate_lease(self._info.model, lease)
        for lease, since in self._missing.items():
            if now - since >= _patience_of(lease):
                for run in running.get(lease, ()):
                    self._control.end(run, "cancelled", cancellation("the bus", "its submitter has gone"))
                if lease in waiting:
                    await self._bus.cancel_orphans(self._info.model, lease, by="the bus")

    async def run(self) -> None:
        """Look for clients and engines that are gone, and for deadlines. Never ends by itself.

        This is a task of its own, since the sweep may take long and must not delay the engine's heartbeat.
        """
        while True:
            await anyio.sleep(self._every_s)
            try:
                await self._claims.give_back()
                await self.end_overtaken()
                await self.end_abandoned()
                await self._recovery.look(but=self._info.engine)
                await self._bus.sweep([next(self._tags) for _ in range(SWEPT)])
            except BusError as error:
                self._missing.clear()
                logger.warning("could not look for clients and engines that are gone: %s", error)


def _patience_of(lease: str) -> float:
    """How long a lease may be missing before its client counts as gone, in seconds: a third of the time in its name."""
    try:
        seconds = float(lease.rpartition(".")[2])
    except ValueError:
        seconds = math.nan
    return min(max(seconds, 1.0), 60.0) / 3 if seconds == seconds else 3.0
