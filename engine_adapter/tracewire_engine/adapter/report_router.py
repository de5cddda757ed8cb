"""Hands the workers' reports to the traces that they belong to.

A step's report takes a shorter way than vLLM's output of the same step, so as a rule it lies ready when the output
comes: whoever needs one looks first, and the event loop is not woken for each. Only when it is not there yet (on a GPU
it comes a step later) is it waited for.
"""

from __future__ import annotations

import time

import anyio

from tracewire_bus.transport.tasks import Signal
from tracewire_engine.protocol.messages import Report

from .engine_api import Engine
from .live_changes import LiveTrace
from .pending import PendingRecords
from .read_decoder import ReadDecoder

__all__ = ["ReportRouter"]

#: How often is looked for reports that are late, in seconds; and what longer between two looks shows that this process
#: did not run.
_LOOK_S, _STALL_S = 0.5, 2.0


class ReportRouter:
    """Takes the engine's reports to `pending`, which it shares with the adapter."""

    def __init__(self, engine: Engine, pending: dict[str, PendingRecords], blob_threshold: int) -> None:
        self._engine = engine
        self._pending = pending
        #: The live parameters of the runs that have any, by run.
        self.live: dict[str, LiveTrace] = {}
        self._decoder = ReadDecoder(blob_threshold)
        self._waiting = 0
        self._wanted = Signal()
        #: How many have come.
        self.count = 0
        #: Whether reports that come behind large arrays wait for Redis here: their workers are not late.
        self.held_up = False

    def pull(self) -> bool:
        """Take what is ready; whether there was anything."""
        reports = self._engine.ready()
        for report in reports:
            self.take(report)
        return bool(reports)

    def add_waiter(self) -> None:
        """Somebody waits for a report, until `remove_waiter`."""
        self._waiting += 1
        self._wanted.notify()

    def remove_waiter(self) -> None:
        """Remove the waiter."""
        self._waiting -= 1

    async def run(self) -> None:
        """Take reports as they come, while somebody waits for one. Never ends by itself."""
        while True:
            while not self._waiting:
                await self._wanted.wait()
            await self._engine.arrived()
            self.pull()

    async def watch(self, patience_s: float) -> None:
        """Give up reports that are late, so that no trace waits for ever for a lost one. Never ends by itself."""
        heard = looked = time.monotonic()
        while True:
            await anyio.sleep(_LOOK_S)
            last, looked = looked, time.monotonic()
            if self.held_up or looked - last > _STALL_S:
                heard = looked
            for pending in self._pending.values():
                pending.give_up_late(looked, heard, patience_s)

    def take(self, report: Report) -> None:
        """Hand one report on."""
        self.count += 1
        for applied in report.applied:
            live = self.live.get(applied.run)
            if live is not None:
                live.report(applied)
        if report.layout is not None:
            self._decoder.layout(report.layout)
        if report.batch is not None:
            data = report.batch.data
            for reads, index in self._decoder.batch(report.batch):
                pending = self._pending.get(reads.request)
                if pending is not None:
                    pending.read(index, reads, data, report.time)
        for step in report.steps:
            pending = self._pending.get(step.request)
            if pending is not None:
                pending.step(step, report.time)
        for finish in report.finishes:
            pending = self._pending.get(finish.request)
            if pending is not None:
                pending.finish(finish)
