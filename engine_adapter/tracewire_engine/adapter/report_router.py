"""Hands the workers' reports to the traces that they belong to.

A step's report takes a shorter way than vLLM's output of the same step, so as a rule it has come when the output comes.
A trace therefore pulls reports first, without waiting, and the event loop is not woken for each report. A trace waits
for a report only when it has not come yet: on a GPU it comes a step later.
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

#: How often the router looks for late reports, in seconds; and after how long between two looks it concludes that this
#: process did not run meanwhile.
_LOOK_S, _STALL_S = 0.5, 2.0


class ReportRouter:
    """Routes the engine's reports to `pending`, by the request's name. The adapter owns `pending`."""

    def __init__(self, engine: Engine, pending: dict[str, PendingRecords], blob_threshold: int) -> None:
        self._engine = engine
        self._pending = pending
        #: The live parameters of the runs that have any, by run.
        self.live: dict[str, LiveTrace] = {}
        self._decoder = ReadDecoder(blob_threshold)
        self._waiting = 0
        self._wanted = Signal()
        #: How many reports have come.
        self.count = 0
        #: Whether reports behind large arrays wait for Redis in the adapter, so that their workers are not late.
        self.held_up = False

    def pull(self) -> bool:
        """Route the reports that have come. Returns whether there were any."""
        before = self.count
        for report in self._engine.ready():
            self.take(report)
        return self.count > before

    def add_waiter(self) -> None:
        """Have `run` route reports as they come, until `remove_waiter`."""
        self._waiting += 1
        self._wanted.notify()

    def remove_waiter(self) -> None:
        """End one `add_waiter`."""
        self._waiting -= 1

    async def run(self) -> None:
        """Route reports as they come while a trace waits for one. Never ends by itself."""
        while True:
            while not self._waiting:
                await self._wanted.wait()
            await self._engine.arrived()
            self.pull()

    async def watch(self, patience_s: float) -> None:
        """Give up reports later than `patience_s`, so that no trace waits forever for a lost one.

        Never ends by itself.
        """
        heard = looked = time.monotonic()
        while True:
            await anyio.sleep(_LOOK_S)
            last, looked = looked, time.monotonic()
            if self.held_up or looked - last > _STALL_S:
                heard = looked
            for pending in self._pending.values():
                pending.give_up_late(looked, heard, patience_s)

    def take(self, report: Report) -> None:
        """Route one report."""
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
