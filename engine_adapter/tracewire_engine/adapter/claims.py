"""The traces that this engine runs, and the commands that write them to Redis again after it has lost them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import msgspec

from tracewire_bus.bus import Bus, Taken
from tracewire_bus.domain.identity import Key
from tracewire_bus.store.control import Order
from tracewire_bus.store.submission_queue import claim_command
from tracewire_bus.wire.live_values import unpack_live
from tracewire_bus.wire.messages import EngineInfo, Submission

from .trace_run import TraceRun

__all__ = ["Claims"]


class Claims:
    """The traces that one engine runs."""

    def __init__(self, bus: Bus, info: EngineInfo) -> None:
        self._bus = bus
        self._info = info
        #: By trace id, the trace's run; while its record is being opened, the orders that have come for it.
        self.runs: dict[str, TraceRun | list[Order]] = {}
        #: By trace id, the trace's queue entry, submission, and deadline by the event loop's clock, if it has one.
        self.entries: dict[str, tuple[Taken, Submission, float | None]] = {}
        #: By trace id, the queue entries that commands on their way to Redis claim for this engine; and those whose
        #: commands Redis has carried out, for `give_back` to check.
        self._sent: dict[str, Taken] = {}
        self._acknowledged: dict[str, Taken] = {}

    def running(self) -> Iterator[TraceRun]:
        """The runs that have begun."""
        return (run for run in self.runs.values() if isinstance(run, TraceRun))

    def commands(self) -> list[tuple[Any, ...]]:
        """Redis commands that claim the running traces for this engine again, after Redis has lost its data."""
        records, model, engine = self._bus.records, self._info.model, self._info.engine
        commands: list[tuple[Any, ...]] = []
        for trace, run in self.runs.items():
            if not isinstance(run, TraceRun) or run.ended or run.fenced:
                continue
            entry, submission, due = self.entries[trace]
            self._sent[trace] = entry
            if due is not None:
                submission = msgspec.structs.replace(submission, deadline_s=max(0.0, due - anyio.current_time()))
            commands += [
                records.create_command(submission, unpack_live(submission.live), self._bus.retention_s),
                self._record_command(run),
                claim_command(
                    *(self._bus.keys, model, engine, entry),
                    client=submission.client,
                    priority=submission.priority,
                    lease="" if submission.detach else submission.lease,
                ),
            ]
        return commands

    def _record_command(self, run: TraceRun) -> tuple[Any, ...]:
        """The command that writes the state of a run into its trace's record again."""
        live = run.live
        return self._bus.records.claim_command(
            *(run.trace, self._info.engine, run.attempt),
            closed=run.closed,
            version=0 if live is None else live.version,
            live={} if live is None else live.changed,
            paused=run.pause.wanted_by,
            pauses=run.pause.number,
        )

    async def tell_record(self, run: TraceRun) -> None:
        """Write the state of a run into its trace's record again, if the trace runs here. A newer record stays.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        if self.runs.get(run.trace) is run and not run.ended and not run.fenced:
            await self._bus.command(*self._record_command(run))

    def acknowledged(self) -> None:
        """Note that Redis has carried out the commands."""
        self._acknowledged |= self._sent
        self._sent.clear()

    def runs_of(self, trace: str, key: Key | None) -> bool:
        """Whether this engine runs a trace that this key has submitted; None for a trace that no key has signed."""
        run = self.runs.get(trace)
        return isinstance(run, TraceRun) and (run.owner and run.owner.id) == (key and key.id)

    async def give_back(self) -> None:
        """Give back queue entries whose traces stopped running here before Redis carried out the claim.

        No other process would find these entries.
        """
        model, engine = self._info.model, self._info.engine
        for trace, entry in list(self._acknowledged.items()):
            claimed = self.entries.get(trace)
            run = self.runs.get(trace)
            # For a trace that still runs, the final event takes the entry from the queue, after the claim.
            if claimed is None or claimed[0] is not entry or (isinstance(run, TraceRun) and run.fenced):
                why = f"engine {engine} no longer runs it"
                await self._bus.queue.put_back(model, engine, why, lost=False, trace=entry.trace, attempt=entry.attempt)
                if claimed is None:
                    self._bus.queue.note_settled(model, entry.trace)
            if self._acknowledged.get(trace) is entry:
                del self._acknowledged[trace]
