"""Reports of the workers on one request that are not published yet.

An output needs two parts: the tokens from vLLM, and the block's saves and the declared interventions' reads of the
steps that sampled those tokens. The workers report the second part over their own link. `PendingRecords` keeps these
reports, by choice and token index, until the tokens are there. A request is over when the finish records of all its
choices have come.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from tracewire_bus.transport.tasks import Signal
from tracewire_bus.wire.codec import extend_encoded_list
from tracewire_bus.wire.messages import StopWhen
from tracewire_bus.wire.pieces import Pieces
from tracewire_engine.protocol.messages import FinishRecord, StepRecord

from .digests import PassingDigests
from .live_changes import LiveTrace
from .read_decoder import NO_READS, ChoiceReads, StepReads

__all__ = ["ENDING_S", "LATE_S", "REPORT_S", "PendingChoice", "PendingRecords", "ReportMissing", "ReportSource"]

#: How long the adapter waits for a report if it has no sign that the report is lost, in seconds, unless the adapter's
#: settings have another time. Reports come with the engine's next step.
REPORT_S = 120.0
#: The same for a request that is to end early, in seconds.
ENDING_S = 20.0
#: The same if a later report has come, in seconds. Reports come in order, except for those behind large arrays, and
#: for the ends of blocks in hosts, whose saves come by another process.
LATE_S = 20.0

_NO_DELTAS = msgspec.Raw(msgspec.msgpack.encode([]))


class ReportMissing(Exception):
    """A report of the workers did not come in time. The adapter has stopped waiting for it."""


class ReportSource(Protocol):
    """Where reports come from: the adapter's report router."""

    def pull(self) -> bool:
        """Route the reports that have come already. Returns whether there were any."""
        ...

    def add_waiter(self) -> None:
        """Have reports routed as they come, until `remove_waiter`. Each waiting task calls this once."""
        ...

    def remove_waiter(self) -> None:
        """Undo one call of `add_waiter`: its task has stopped waiting."""
        ...


class PendingChoice:
    """The unpublished reports of one choice of a request, and where the choice ended."""

    __slots__ = (
        *("asked", "digests", "ended", "ended_at", "finish", "read", "reads", "reason", "stepped", "steps", "taken"),
        "time",
    )

    def __init__(self, stops: Sequence[StopWhen], *, columns: bool = True) -> None:
        self.steps: dict[int, msgspec.Raw] = {}
        self.reads = ChoiceReads(stops, columns=columns)
        self.digests = PassingDigests()
        self.ended = ""
        #: The `stop_reason` of the choice's last output.
        self.reason = "tracer.stop()"
        self.ended_at: int | None = None
        #: When the last reported step ended.
        self.time = 0.0
        self.finish: FinishRecord | None = None
        #: The number of step records that have come, and of steps whose reads have come.
        self.stepped = self.read = 0
        #: For shared values: the number of steps taken.
        self.taken = 0
        #: The first token index whose report was not asked for yet.
        self.asked = 0

    def has_gap(self, reads: bool) -> bool:
        """Whether a report is missing before those that have come. `reads`: whether the workers report reads."""
        if self.finish is not None and not self.complete(reads):
            return True
        return any(len(one) < max(one) + 1 - self.asked for one in (self.steps, self.reads.steps) if one)

    @property
    def lacks_saves(self) -> bool:
        """Whether the choice's end is reported, and not all steps that the end counts. Their saves come another way."""
        finish = self.finish
        return finish is not None and finish.error is None and self.stepped < finish.steps

    def take(self, index: int) -> msgspec.Raw:
        """Take the report of a step that is part of the trace. Steps are taken in order."""
        deltas = self.steps.pop(index, _NO_DELTAS)
        if deltas != _NO_DELTAS:
            self.digests.take(deltas)
        return deltas

    def take_rest(self, tokens: int) -> list[msgspec.Raw]:
        """Take the reports of the remaining steps, in order: saves up to the finish record's number of tokens, and
        reads of the first `tokens` tokens. The saves of later steps are not part of the trace.
        """
        found = []
        covered = self.finish.tokens if self.finish is not None else -1
        for index in sorted(self.steps.keys() | self.reads.steps.keys()):
            raw = self.take(index) if covered < 0 or index < covered else _NO_DELTAS
            reads = self.reads.steps.get(index, NO_READS) if index < tokens else NO_READS
            if reads != NO_READS or raw != _NO_DELTAS:
                found.append(msgspec.Raw(bytes(_with_reads(raw, reads))))
        return found

    def end_at(self, index: int, ended: str, reason: str) -> None:
        """End the choice at token `index`, unless it has ended before."""
        if self.ended_at is None or index < self.ended_at:
            self.ended, self.ended_at, self.reason = ended, index, reason

    def drop(self) -> None:
        """Drop the reports of all steps."""
        self.steps.clear()
        self.reads.steps.clear()

    def complete(self, reads: bool) -> bool:
        """Whether every report of the choice has come. A finish record may overtake other reports."""
        finish = self.finish
        if finish is None or self.stepped < finish.steps:
            return False
        return not reads or finish.error is not None or self.read >= finish.steps


class PendingRecords:
    """The workers' reports on one request, by choice and token index.

    `block` and `reads` say whether the workers report the saves of a block and the reads of declared interventions in
    every step.
    """

    def __init__(
        self,
        choices: int,
        trace: str = "",
        *,
        block: bool = True,
        reads: bool = False,
        stops: Sequence[StopWhen] = (),
        reports: ReportSource | None = None,
        live: LiveTrace | None = None,
        limit: int = 0,
    ) -> None:
        self.trace = trace
        self._reports = reports
        self._live = live
        # A limited request is not a trace's: the reads of each of its edits go to a stream of their own, by name.
        self.choices = [PendingChoice(stops, columns=not limit) for _ in range(choices)]
        #: Whether large arrays have come, behind which the finish record may wait for Redis.
        self.large = False
        self._block = block
        self._reads = reads
        self._nbytes = 0
        #: How many bytes of large arrays have come, in all.
        self.chunk_bytes = 0
        self._limit = limit
        #: Whether the reports of steps took more than `limit` bytes and were dropped.
        self.dropped = False
        #: Since when a task waits for a report that should come by itself, by `time.monotonic`.
        self._due_since: float | None = None
        #: Whether the request is to end early; and whether the adapter has given up a report that did not come.
        self.ending = False
        self.given_up = False
        #: For the one task that publishes the request's outputs.
        self._changed = Signal()

    def _enforce_limit(self) -> None:
        """Drop the reports of steps if they exceed the limit. No task takes reports of a limited request."""
        if not self._limit or not (self.dropped or self.nbytes > self._limit):
            return
        self.dropped, self._nbytes = True, 0
        for choice in self.choices:
            choice.drop()
            choice.reads.blobs.clear()

    @property
    def nbytes(self) -> int:
        """The approximate memory of the unpublished reports, in bytes."""
        nbytes = self._nbytes
        for choice in self.choices:
            for _, raw in choice.reads.blobs:
                nbytes += len(raw)
        return nbytes

    def step(self, record: StepRecord, ended_at: float) -> None:
        """Take the record of a step that ended at `ended_at`."""
        choice = self.choices[record.choice]
        choice.time = ended_at
        before = choice.steps.get(record.index)
        choice.steps[record.index] = record.deltas
        self._nbytes += _size(record.deltas) - (0 if before is None else _size(before))
        choice.stepped += 1
        if record.ended:
            choice.end_at(record.index, record.ended, choice.reason)
        self._enforce_limit()
        self._changed.notify()

    def read(self, index: int, step: StepReads, data: memoryview, ended_at: float) -> None:
        """Take the reads of declared interventions in the step that sampled token `index`."""
        choice = self.choices[step.choice]
        choice.time = ended_at
        choice.read += 1
        reads = choice.reads
        reads.take(index, step, data)
        self._nbytes += len(reads.steps.get(index, b""))
        if reads.stopped is not None and reads.stopped_at is not None:
            choice.end_at(reads.stopped_at, "stop", f"StopWhen({reads.stopped.probe})")
        self._enforce_limit()
        self._changed.notify()

    def finish(self, record: FinishRecord) -> None:
        """Take a choice's finish record."""
        self.choices[record.choice].finish = record
        self._changed.notify()

    def take_new(self) -> list[msgspec.Raw]:
        """Take the encoded deltas of shared values: of the consecutive steps since the last call."""
        choice = self.choices[0]
        found = []
        while choice.taken in choice.steps:
            found.append(deltas := choice.take(choice.taken))
            choice.taken = choice.asked = choice.taken + 1
            self._nbytes -= _size(deltas)
        return found

    def set_stops(self, stops: Sequence[StopWhen]) -> None:
        """Take the stop conditions of the steps that follow a live change; an empty list changes none."""
        if stops:
            for choice in self.choices:
                choice.reads.set_stops(stops)
        self._changed.notify()

    def _has_reported(self, one: PendingChoice, index: int) -> bool:
        if not self._block and not self._reads:
            # The workers report no steps. Only their report of a live change tells the change's token.
            return self._live is None or not self._live.outstanding
        if one.ended == "error" and one.ended_at == index and index in one.steps:
            return True
        return (not self._block or index in one.steps) and (not self._reads or index in one.reads.steps)

    def _missing(self, one: PendingChoice, wanted: range) -> int | None:
        """The first of these indices whose report has not come."""
        for index in wanted:
            if not self._has_reported(one, index):
                return index
        return None

    async def steps(self, choice: int, first: int, count: int) -> list[msgspec.Raw | Pieces]:
        """The encoded deltas of token indices `first` to `first + count - 1`, when the workers have reported them.

        An index that no worker will report, because the choice has ended, has no deltas. Neither has an index behind
        the choice's end.

        Raises:
            ReportMissing: a report was lost on its way.
        """
        one = self.choices[choice]
        one.asked = first
        wanted = range(first, first + count)
        while (missing := self._missing(one, wanted)) is not None and not one.complete(self._reads):
            ended_at = one.ended_at if one.ended_at in wanted else None
            # Each of them is checked: records that come by two ways may overtake each other.
            if ended_at is not None and self._missing(one, range(first, ended_at + 1)) is None:
                break
            if self.given_up:
                raise ReportMissing(f"the workers' report of token {missing} was lost")
            await self._wait_due()
        one.asked = first + count
        if one.ended_at is not None and one.ended_at in wanted:
            wanted = range(first, one.ended_at + 1)
        found = [self._take(one, index) for index in wanted]
        return found + [_NO_DELTAS] * (count - len(found))

    def _take(self, one: PendingChoice, index: int) -> msgspec.Raw | Pieces:
        """Take the reports of a step: the deltas of the block's saves, and behind them those of the reads."""
        deltas = _NO_DELTAS
        if index in one.steps:
            deltas = one.take(index)
            self._nbytes -= _size(deltas)
        reads = one.reads.steps.pop(index, b"")
        self._nbytes -= len(reads)
        return _with_reads(deltas, reads or NO_READS)

    @property
    def ended(self) -> bool:
        """Whether the workers have reported the end of every choice."""
        return all(choice.finish is not None for choice in self.choices)

    @property
    def failed(self) -> bool:
        """Whether the workers have ended a choice with an error."""
        return any(choice.ended == "error" for choice in self.choices)

    async def wait_reported(self, tokens: Sequence[int]) -> None:
        """Wait for the reports of the first `tokens[choice]` steps of each choice. Returns earlier for a choice that
        has ended, and when the adapter gives up a report.
        """
        for choice, count in zip(self.choices, tokens, strict=True):
            while choice.ended != "error" and not choice.complete(self._reads) and not self.given_up:
                if (not self._block or choice.stepped >= count) and (not self._reads or choice.read >= count):
                    break
                await self._wait_due()

    async def wait_failed(self) -> None:
        """Wait until the workers have ended a choice with an error."""
        while not self.failed:
            await self._wait()

    async def wait_finished(self) -> None:
        """Wait until the workers have reported the end of every choice, or the adapter gives up a report."""
        while not self.given_up and not all(choice.complete(self._reads) for choice in self.choices):
            await self._wait_due()

    def choice_complete(self, choice: int) -> bool:
        """Whether every report of a choice has come."""
        return self.choices[choice].complete(self._reads)

    def give_up_late(self, now: float, heard: float, patience_s: float) -> None:
        """Give up the report that a task waits for, if it is late.

        `now` and `heard` are times of `time.monotonic`; the adapter could read no report before `heard`. The wait ends
        after `patience_s` seconds, or earlier where a sign shows that the report is lost.
        """
        if self._due_since is None:
            return
        if not self.large and any(choice.has_gap(self._reads) for choice in self.choices):
            patience_s = min(patience_s, LATE_S)
        elif self.ending:
            patience_s = min(patience_s, ENDING_S)
        if now - max(self._due_since, heard) > patience_s:
            self.given_up = True
            self._changed.notify()

    def note_chunk(self, nbytes: int = 0) -> None:
        """Note that a part of a large array has come. The wait starts anew: the report may come behind the array."""
        self.large = True
        self.chunk_bytes += nbytes
        if self._due_since is not None:
            self._due_since = time.monotonic()

    async def _wait_due(self) -> None:
        """Wait for a report that should come by itself: `give_up_late` limits the wait. May return without a report."""
        self._due_since = time.monotonic()
        try:
            await self._wait()
        finally:
            self._due_since = None

    async def _wait(self) -> None:
        """Wait for a report of this request. May return without one."""
        if self._reports is None:
            await self._changed.wait()
        elif not self._reports.pull():
            self._reports.add_waiter()
            try:
                await self._changed.wait()
            finally:
                self._reports.remove_waiter()


def _with_reads(deltas: msgspec.Raw, reads: bytes) -> msgspec.Raw | Pieces:
    """The encoded deltas of a step's saves, and behind them those of its reads."""
    if deltas is _NO_DELTAS or deltas == _NO_DELTAS:
        return msgspec.Raw(reads)
    return deltas if reads == NO_READS else extend_encoded_list(memoryview(deltas), reads)


def _size(deltas: msgspec.Raw) -> int:
    """The approximate size of a step's record, in bytes."""
    return memoryview(deltas).nbytes + 200
