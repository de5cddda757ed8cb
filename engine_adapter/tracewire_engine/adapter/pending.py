"""Reports of the workers on one request that are not published yet.

An output needs two parts: the tokens that vLLM put out, and what the block saved and declared interventions read in
the steps that sampled those tokens, which the workers report by their own link. `PendingRecords` keep the second until
the first is there, by choice and token index. A request is over when the finish records of all its choices have come.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from tracewire_bus.transport.tasks import Signal
from tracewire_bus.wire.messages import StopWhen
from tracewire_engine.protocol.messages import FinishRecord, StepRecord

from .digests import PassingDigests
from .live_changes import LiveTrace
from .read_decoder import ChoiceReads, Item, extend_encoded_list

__all__ = ["ENDING_S", "LATE_S", "REPORT_S", "PendingChoice", "PendingRecords", "ReportMissing", "ReportSource"]

#: How long a report of the workers may take that nothing shows to be lost, in seconds, unless the adapter's settings
#: say otherwise: it comes with the engine's next step.
REPORT_S = 120.0
#: Likewise, of a request that is to end early.
ENDING_S = 20.0
#: Likewise, where a later report is there already: they come in order, but for those behind large arrays.
LATE_S = 5.0

_NO_DELTAS = msgspec.Raw(msgspec.msgpack.encode([]))


class ReportMissing(Exception):
    """Something that the workers should have reported did not come, and will not."""


class ReportSource(Protocol):
    """Where reports come from: the adapter's report router."""

    def pull(self) -> bool:
        """Route the reports that have come already. Returns whether there were any."""
        ...

    def add_waiter(self) -> None:
        """Have reports routed as they come, until `remove_waiter`: somebody waits for one."""
        ...

    def remove_waiter(self) -> None:
        """End one `add_waiter`."""
        ...


class PendingChoice:
    __slots__ = (
        *("asked", "digests", "ended", "ended_at", "finish", "read", "reads", "reason", "stepped", "steps", "taken"),
        "time",
    )

    def __init__(self, stops: Sequence[StopWhen]) -> None:
        self.steps: dict[int, msgspec.Raw] = {}
        self.reads = ChoiceReads(stops)
        self.digests = PassingDigests()
        self.ended = ""
        #: What vLLM's `stop_reason` would say.
        self.reason = "tracer.stop()"
        self.ended_at: int | None = None
        #: When the last reported step ended.
        self.time = 0.0
        self.finish: FinishRecord | None = None
        #: How many records of steps have come, and how many steps' reads.
        self.stepped = self.read = 0
        #: Of shared values, how many steps were taken.
        self.taken = 0
        #: From which token on nobody has asked for what was reported.
        self.asked = 0

    def has_gap(self, reads: bool) -> bool:
        """Whether what has come shows that something before it has not."""
        if self.finish is not None and not self.complete(reads):
            return True
        return any(len(one) < max(one) + 1 - self.asked for one in (self.steps, self.reads.steps) if one)

    def take(self, index: int) -> msgspec.Raw:
        """Take the report of a step that is part of the trace. Steps are taken in order."""
        deltas = self.steps.pop(index, _NO_DELTAS)
        if deltas != _NO_DELTAS:
            self.digests.take(deltas)
        return deltas

    def take_rest(self, tokens: int) -> list[msgspec.Raw]:
        """Take what was reported of steps that nobody has taken, in order, as far as the choice's end covers it; of
        reads, those of the first `tokens` tokens. What later steps saved does not count.
        """
        found = []
        covered = self.finish.tokens if self.finish is not None else -1
        for index in sorted(self.steps.keys() | self.reads.steps.keys()):
            raw = self.take(index) if covered < 0 or index < covered else _NO_DELTAS
            more = self.reads.steps.get(index) if index < tokens else None
            if more or raw != _NO_DELTAS:
                found.append(extend_encoded_list(bytes(raw), more) if more else raw)
        return found

    def end_at(self, index: int, ended: str, reason: str) -> None:
        """End the choice at token `index`, unless it has ended before."""
        if self.ended_at is None or index < self.ended_at:
            self.ended, self.ended_at, self.reason = ended, index, reason

    def drop(self) -> None:
        """Let go of what was reported of steps."""
        self.steps.clear()
        self.reads.steps.clear()

    def complete(self, reads: bool) -> bool:
        """Whether nothing more will come: its end may overtake what takes another way."""
        finish = self.finish
        if finish is None or self.stepped < finish.steps:
            return False
        return not reads or finish.error is not None or self.read >= finish.steps


class PendingRecords:
    """The workers' reports on one request, by choice and token index.

    `block` and `reads` say what is reported of every step: what a block saved, what declared interventions read.
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
        self.choices = [PendingChoice(stops) for _ in range(choices)]
        #: Whether large arrays have come, behind which the finish record may wait for Redis.
        self.large = False
        self._block = block
        self._reads = reads
        self._nbytes = 0
        self._limit = limit
        #: Whether what was reported of steps took more than `limit`, and was let go of.
        self.dropped = False
        #: Since when what should have been reported is waited for, and nothing comes, by `time.monotonic`.
        self._due_since: float | None = None
        #: Whether the request is to end early; and whether something that was to come is not waited for any more.
        self.ending = False
        self.given_up = False
        #: For the one task that publishes the request's outputs.
        self._changed = Signal()

    def _enforce_limit(self) -> None:
        """Let go of what was reported of steps, which nobody will take, when it is too much."""
        if not self._limit or not (self.dropped or self.nbytes > self._limit):
            return
        self.dropped, self._nbytes = True, 0
        for choice in self.choices:
            choice.drop()
            choice.reads.blobs.clear()

    @property
    def nbytes(self) -> int:
        """How much memory what is not published yet takes, in bytes, about."""
        return self._nbytes + sum(len(raw) for choice in self.choices for _, raw in choice.reads.blobs)

    def step(self, record: StepRecord, ended_at: float) -> None:
        """Take the record of a step that ended at `ended_at`."""
        choice = self.choices[record.choice]
        choice.time = ended_at
        choice.steps[record.index] = record.deltas
        self._nbytes += _size(record.deltas)
        choice.stepped += 1
        if record.ended:
            choice.end_at(record.index, record.ended, choice.reason)
        self._enforce_limit()
        self._changed.notify()

    def read(self, choice_index: int, index: int, items: Sequence[Item], data: memoryview, ended_at: float) -> None:
        """Take what declared interventions read in the step that sampled token `index`."""
        choice = self.choices[choice_index]
        choice.time = ended_at
        choice.read += 1
        reads = choice.reads
        reads.take(index, items, data)
        self._nbytes += sum(map(len, reads.steps.get(index, ())))
        if reads.stopped is not None and reads.stopped_at is not None:
            choice.end_at(reads.stopped_at, "stop", f"StopWhen({reads.stopped.probe})")
        self._enforce_limit()
        self._changed.notify()

    def finish(self, record: FinishRecord) -> None:
        """Take a choice's finish record."""
        self.choices[record.choice].finish = record
        self._changed.notify()

    def take_new(self) -> list[msgspec.Raw]:
        """The encoded deltas of the steps of shared values, as far as they have come and were not taken yet."""
        choice = self.choices[0]
        found = []
        while choice.taken in choice.steps:
            found.append(deltas := choice.take(choice.taken))
            choice.taken = choice.asked = choice.taken + 1
            self._nbytes -= _size(deltas)
        return found

    def set_stops(self, stops: Sequence[StopWhen]) -> None:
        """Live parameters have changed: the stop conditions of the steps that follow, if there are any."""
        if stops:
            for choice in self.choices:
                choice.reads.set_stops(stops)
        self._changed.notify()

    def _has_reported(self, one: PendingChoice, index: int) -> bool:
        if not self._block and not self._reads:
            # Nothing is reported of each step: only the next word on a change says where it belongs.
            return self._live is None or not self._live.outstanding
        if one.ended == "error" and one.ended_at == index and index in one.steps:
            return True
        return (not self._block or index in one.steps) and (not self._reads or index in one.reads.steps)

    async def steps(self, choice: int, first: int, count: int) -> list[msgspec.Raw]:
        """The encoded deltas of token indices `first` to `first + count - 1`, when the workers have reported them.

        Indices that a worker will not report any more, because the choice has ended, count as having none, and so do
        those behind its end.

        Raises:
            ReportMissing: one of them was lost on its way.
        """
        one = self.choices[choice]
        one.asked = first
        wanted = range(first, first + count)
        while not one.complete(self._reads) and not all(self._has_reported(one, index) for index in wanted):
            ended_at = one.ended_at if one.ended_at in wanted else None
            # All of them: records that come by two ways may overtake each other.
            if ended_at is not None and all(self._has_reported(one, index) for index in wanted if index <= ended_at):
                break
            if self.given_up:
                missing = next(index for index in wanted if not self._has_reported(one, index))
                raise ReportMissing(f"what the workers reported of token {missing} was lost")
            await self._wait_due()
        one.asked = first + count
        if one.ended_at is not None and one.ended_at in wanted:
            wanted = range(first, one.ended_at + 1)
        for index in wanted:
            if index in one.steps:
                self._nbytes -= _size(one.steps[index])
            self._nbytes -= sum(map(len, one.reads.steps.get(index, ())))
        found = [one.take(index) for index in wanted]
        found += [_NO_DELTAS] * (count - len(found))
        if self._reads:
            for place, index in enumerate(wanted):
                more = one.reads.steps.pop(index, None)
                if more:
                    found[place] = extend_encoded_list(bytes(found[place]), more)
        return found

    @property
    def failed(self) -> bool:
        """Whether the workers have ended a choice with an error."""
        return any(choice.ended == "error" for choice in self.choices)

    async def wait_reported(self, tokens: Sequence[int]) -> None:
        """Wait until what is reported of each step has come, for that many tokens of each choice; or the end has, or it
        is given up.
        """
        for choice, count in zip(self.choices, tokens, strict=True):
            while choice.ended != "error" and not choice.complete(self._reads) and not self.given_up:
                if (not self._block or choice.stepped >= count) and (not self._reads or choice.read >= count):
                    break
                await self._wait_due()

    async def wait_failed(self) -> None:
        """Wait until they have."""
        while not self.failed:
            await self._wait()

    async def wait_finished(self) -> None:
        """Wait until the workers have reported the end of every choice, or that is given up."""
        while not self.given_up and not all(choice.complete(self._reads) for choice in self.choices):
            await self._wait_due()

    def choice_complete(self, choice: int) -> bool:
        """Whether all that was to be reported of a choice has come."""
        return self.choices[choice].complete(self._reads)

    def give_up_late(self, now: float, heard: float, patience_s: float) -> None:
        """Give up what is waited for if it is late. No report could be read before `heard`."""
        if self._due_since is None:
            return
        if not self.large and any(choice.has_gap(self._reads) for choice in self.choices):
            patience_s = min(patience_s, LATE_S)
        elif self.ending:
            patience_s = min(patience_s, ENDING_S)
        if now - max(self._due_since, heard) > patience_s:
            self.given_up = True
            self._changed.notify()

    def note_chunk(self) -> None:
        """A part of a large array has come, behind which what is waited for may be."""
        self.large = True
        if self._due_since is not None:
            self._due_since = time.monotonic()

    async def _wait_due(self) -> None:
        """Wait until something has come for this request, perhaps, that should come by itself."""
        self._due_since = time.monotonic()
        try:
            await self._wait()
        finally:
            self._due_since = None

    async def _wait(self) -> None:
        """Wait until something has come for this request, perhaps."""
        if self._reports is None:
            await self._changed.wait()
        elif not self._reports.pull():
            self._reports.add_waiter()
            try:
                await self._changed.wait()
            finally:
                self._reports.remove_waiter()


def _size(deltas: msgspec.Raw) -> int:
    """The approximate size of a step's record, in bytes."""
    return memoryview(deltas).nbytes + 200
