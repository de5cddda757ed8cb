"""A host as the worker sees it: the traces whose blocks it runs, and what it still has to be told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from tracewire_bus.wire.messages import Failure
from tracewire_engine.link.host_channel import HostChannel
from tracewire_engine.protocol.block_host import (
    LARGE_OF_HOST,
    Arrived,
    Began,
    Ended,
    Event,
    Finished,
    Reached,
    Repeated,
    Reply,
    Turn,
)
from tracewire_engine.protocol.keys import BLOCK_ARG

from .host_load import HostLoad
from .joined_accounts import JoinedAccounts
from .passed_arrays import HostArrays
from .pool import HostProcess
from .reading import Account, union
from .relay_link import RelayedSaves
from .rows import NoRoom, SharedRows, StepRows
from .staged_step import GivenShare, HostRows, HostShare, Reading, StagedStep
from .untrusted_reports import UntrustedReports

__all__ = ["BlockHost", "HostedRequest", "HostedTrace", "LateTurn"]

_encode = msgspec.msgpack.Encoder().encode


class HostedRequest:
    """A live request of a trace: the adapter's id of it, its choice, and what was reported of it."""

    __slots__ = ("choice", "ended", "finished", "finished_at", "id", "index", "over", "request", "steps", "trace")

    def __init__(self, trace: HostedTrace, request_id: str, request: str, choice: int) -> None:
        self.trace, self.id, self.request, self.choice = trace, request_id, request, choice
        #: The index of the token of the last step that was passed on, and how many steps those were. While its host is
        #: there, they are those that its host has reported to the worker.
        self.index, self.steps = -1, 0
        #: Whether its blocks have ended it, whether the scheduler has, and whether its end was reported.
        self.ended = self.finished = self.over = False
        self.finished_at = 0.0


class HostedTrace:
    """One trace.

    Args:
        name: of its attempt.
        host: of its blocks.
        choices: how many choices all of its requests have together.
    """

    def __init__(self, name: str, host: BlockHost, choices: int) -> None:
        self.name, self.host, self.choices = name, host, choices
        #: What is certain of its blocks; `None` before its first request.
        self.account: Account | None = None
        #: All requests that the host was told of, by the scheduler's id.
        self.requests: dict[str, HostedRequest] = {}
        self.shared_names: set[str] = set()
        self.idle_since = 0.0
        #: Whether the worker will see no more request of it; and whether all ends of its requests are reported.
        self.complete = self.closed = False

    @property
    def keeps(self) -> bool:
        """Whether no block of its host changes an array that one of its own has saved."""
        return self.account is not None and self.account.keeps and self.host.reads is not None

    @property
    def failure(self) -> Failure | None:
        """Why its host is of no use any more, if so."""
        return self.host.failure


class LateTurn:
    """A turn of a host that is sent later, and its rows, which may be on their way from a GPU."""

    def __init__(self, host: BlockHost, turn: Turn, late: list[HostRows]) -> None:
        self.host, self._turn, self._late = host, turn, late
        #: Since when it waits.
        self.since = time.monotonic()

    @property
    def turns(self) -> int:
        """How many turns were joined in it."""
        return self._turn.turns

    @property
    def mark(self) -> int:
        """How many bytes of the host's memory were given out with it and before."""
        return self._turn.mark

    @property
    def ready(self) -> bool:
        """Whether `send` does not wait."""
        return all(rows.done for rows in self._late)

    def join(self, later: LateTurn) -> None:
        """Take the host's next turn into this one."""
        self._turn.events += later._turn.events
        self._turn.names += later._turn.names
        self._turn.mark = later._turn.mark
        self._turn.turns += later.turns
        self._turn.large_allowed = later._turn.large_allowed
        self._turn.limited |= later._turn.limited
        self._late += later._late

    def send(self) -> None:
        """Send it. Waits for what is on its way.

        Raises:
            ChannelClosed: the host is gone.
        """
        host = self.host
        while self._late:
            try:
                self._late[0].arrive(host.process.given)
            except BaseException:
                self.drop()
                raise
            del self._late[0]
        if host.turns == host.taken:
            host.owes_since = time.monotonic()
        host.turns += self.turns
        if (saves := host.saves) is not None:
            allowed = host.turns + host.untrusted.ends
            saves.allow(allowed, allowed - self.turns)
        host.calls.send(_encode(self._turn))
        if host.calls.unsent:
            host.kept_back()

    def drop(self) -> None:
        """Give up its rows."""
        late, self._late = self._late, []
        for rows in late:
            rows.drop()


class _UntoldReadings(NamedTuple):
    """A host's rows of some values of a step, of which it has not been told (see `HostShare.events`).

    Attributes:
        readings: the values; none for all those of the step.
    """

    share: HostShare
    readings: list[Reading]
    start: int
    passed: Any
    before: int

    def events(self) -> list[Reached]:
        """What the host is told of them."""
        readings = self.readings or self.share.parts()[0]
        return self.share.events(readings, self.start, self.passed, self.before)

    @property
    def through(self) -> int:
        """How many locations the model has passed with the last of them."""
        return (self.readings or self.share.parts()[0])[-1].passed + 1


class _ToldStep:
    """The last whole step of which a host was told, and what it has been told of the step after."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, int, int]] = []
        self._given: GivenShare | None = None
        self._passed = b""
        #: Of the step that has begun.
        self._began = Began([], [])
        self._read: list[GivenShare | None] = []

    @property
    def spans(self) -> list[tuple[str, int, int]]:
        """The requests of the step that has begun last."""
        return self._began.spans

    def begin(self, began: Began) -> None:
        """A step begins."""
        self._began, self._read = began, []

    def read(self, given: GivenShare | None) -> None:
        """The host is told of all its rows of the step, if `given` is something, or else of some of them."""
        self._read.append(given)

    def end(self, passed: Any) -> None:
        """The host is told that the step has ended."""
        self._spans, self._passed = self._began.spans, passed.tobytes()
        self._given = self._read[0] if len(self._read) == 1 else None

    def may_repeat(self, given: GivenShare | None, events: list[Event]) -> bool:
        """Whether the step's rows are those of the step before, as far as is known before it ends.

        Args:
            given: what the host gets of the step.
            events: of which the host has not been told.
        """
        same = given is not None and given is self._given
        return same and not self._read and bool(events) and events[-1] is self._began

    def repeats(self, events: list[Event], passed: Any) -> bool:
        """Whether the step is the one before with the next tokens: what the model has passed shows it, too."""
        began = self._began
        if began.new or not events or events[-1] is not began or passed.tobytes() != self._passed:
            return False
        if began.spans != [(request, count, index + 1) for request, count, index in self._spans]:
            return False
        self._spans = began.spans
        return True


class BlockHost:
    """A process that runs blocks, and the traces that they belong to.

    Args:
        process: the host's.
        kind: whose traces it may take, and whether they only read: a tenant's name, and whether the model goes on
            without waiting. `None`: it is one trace's alone.
        like: another host of its kind, if there is one.
    """

    # whole: what is known of a host
    def __init__(self, process: HostProcess, kind: tuple[str, bool] | None, like: BlockHost | None = None) -> None:
        self.process, self.kind, self.accounts = process, kind, JoinedAccounts()
        #: How much its blocks have to do in a step.
        self.load: HostLoad = HostLoad(None if like is None else like.load)
        self.traces: dict[str, HostedTrace] = {}
        #: The requests of its traces by the adapter's id and the choice, as records name them; and the traces by the
        #: names of their shared values' records.
        self.records: dict[tuple[str, int], HostedRequest] = {}
        self.shared_names: dict[str, HostedTrace] = {}
        self.new: list[Arrived] = []
        self.failure: Failure | None = None
        #: The encoded block of its trace, if it is one trace's alone.
        self.block: bytes | None = None
        #: Whether it failed while it had several traces, so that nobody knows whose blocks it was.
        self.failed_together = False
        #: The locations that its blocks may ask for, if all of them only read. Then the model never waits for it.
        #: `None`: the model waits wherever a block asks for something.
        self.reads: frozenset[str] | None = frozenset() if kind is None or kind[1] else None
        #: What is certain of all of its blocks; and whether a stream waits for the host in the step, and not the
        #: model's thread (`stream_visits.py`).
        self.account = union([])
        self.visited = False
        self.rows: StepRows | None = None
        #: Locations at which the model waits, and how often it passes each before; and those of which rows are sent.
        self.waits: dict[str, int] = {}
        self.observed: frozenset[str] = frozenset()
        self.begins = False
        #: The requests of the last step that it took part in.
        self.present: frozenset[str] = frozenset()
        #: For how many microseconds it says that it has worked for its replies in the step; and the same of the step of
        #: which a stream has waited for it last, with the number of that step.
        self.replied_us, self.visited_us, self.visited_step = 0, 0, -1
        #: How many requests it was told of; and of the reply whose blocks ask for nothing any more, as many and the
        #: requests that were in its step.
        self.arrivals = 0
        self.calm: tuple[int, frozenset[str]] | None = None
        #: The location that was reached last, until the host has answered.
        self.shared: SharedRows | None = None
        #: How many turns the host was sent, how many of them it has taken, and since when it owes the others.
        self.turns = self.taken = 0
        self.owes_since = 0.0
        #: Since when it has no trace; whether it gets none any more; and whether its end has been reported.
        self.idle_since = time.monotonic()
        self.retired = self.lost = False
        #: What of its large arrays waits to be sent; how many bytes of them it may have sent; and what is
        #: called when the kernel did not take a turn whole.
        self.arrays = HostArrays()
        self.allowed: Callable[[], int] = lambda: LARGE_OF_HOST
        self.kept_back: Callable[[], None] = lambda: None
        #: Checks what it reports; and what the save relay is told of it, once the relay has its connection.
        self.untrusted = UntrustedReports(process.large)
        self.saves: RelayedSaves | None = None
        self._lock = threading.Lock()
        self._events: list[Event] = []
        #: What it was told of the last whole step; and of this one what `end` tells it, if that is not the same.
        self._told = _ToldStep()
        self._again: _UntoldReadings | None = None
        self._names = self._passed = 0
        #: Rows of the next turn that are on their way from a GPU; how many turns had to wait for theirs, which the
        #: model's thread counts; and how many of these were sent.
        self._late: list[HostRows] = []
        self.late_turns = self.late_sent = 0

    # --- its traces ---------------------------------------------------------------------------------------------------

    def add(self, trace: HostedTrace) -> bool:
        """Take a new trace. Returns whether it does: a host that is being closed takes none."""
        with self._lock:
            if self.retired:
                return False
            if (other := self.traces.get(trace.name)) is not None:
                # Its place is taken before it is forgotten.
                self.accounts.replace(other.account, None)
            self.traces[trace.name] = trace
            return True

    def take_request(self, request: HostedRequest, arrived: Arrived, account: Account) -> None:
        """Take a new request of one of its traces. `account` is of the request's blocks."""
        trace = request.trace
        earlier = trace.account
        self.arrivals += 1
        self.new.append(arrived)
        self.block = arrived.arguments.get(BLOCK_ARG) if self.kind is None else None
        trace.requests[request.id] = self.records[request.request, request.choice] = request
        # Another thread may close it.
        if (saves := self.saves) is not None:
            saves.expect(request.request, request.choice)
        with self._lock:
            trace.account = union([account] if earlier is None else [earlier, account])
            self.accounts.replace(earlier, trace.account)
            self._join_reads()

    def share(self, trace: HostedTrace, name: str) -> None:
        """Take the name of the records of values that a trace's blocks share."""
        if (saves := self.saves) is not None and name not in self.shared_names:
            saves.expect(name, 0)
        trace.shared_names.add(name)
        self.shared_names[name] = trace

    def _join_reads(self) -> None:
        known = self.accounts.joined
        # What other blocks have done here stays, such as a network in the model's tree.
        self.account = known if self.account.computes else replace(known, computes=False)
        # Once it is `None` it stays so, since a reply's account of what its blocks wait for is of all of its traces.
        self.reads = None if self.reads is None else self.account.reads
        if self.reads is not None:
            self.observed = self.reads

    def drop(self, trace: HostedTrace) -> None:
        """Forget a trace that is over."""
        for request in trace.requests.values():
            if self.records.get((request.request, request.choice)) is request:
                del self.records[request.request, request.choice]
        for name in trace.shared_names:
            self.shared_names.pop(name, None)
        with self._lock:
            if self.traces.get(trace.name) is trace:
                del self.traces[trace.name]
                self.accounts.replace(trace.account, None)
            self.idle_since = time.monotonic()
            self._join_reads()

    def retire(self) -> bool:
        """Take no trace any more. Returns whether it has none, and was not retired before."""
        with self._lock:
            if self.retired or self.traces:
                return False
            self.retired = True
            return True

    def fail(self, failure: Failure, *, blameless: bool = False) -> bool:
        """Note why it is of no use any more. Returns whether that was not known before.

        Args:
            failure: the error of its traces.
            blameless: whether none of its traces can be to blame.
        """
        if self.failure is not None:
            return False
        self.failed_together = blameless or len(self.traces) > 1
        self.failure = failure
        return True

    # --- its turns ----------------------------------------------------------------------------------------------------

    @property
    def calls(self) -> HostChannel:
        """The connection over which the host takes turns."""
        return self.process.calls

    def begin(
        self, spans: list[tuple[str, int, int]], rows: StepRows | None, present: frozenset[str] | None = None
    ) -> None:
        """Begin a step.

        Args:
            spans: the requests of its traces, as in `Began`.
            rows: of these requests; `None` if there are none.
            present: the names of the requests, if the caller has them at hand.
        """
        self.worked(self.replied_us)
        self.rows, self._passed, self.replied_us = rows, 0, 0
        self.present = frozenset([name for name, _, _ in spans]) if present is None else present
        began = Began(self.new, spans)
        self._events.append(began)
        self._told.begin(began)
        self.new, self._again = [], None

    @property
    def begun(self) -> list[tuple[str, int, int]]:
        """The requests of the last step that has begun, as in `Began`."""
        return self._told.spans

    def only_read(self, reads: frozenset[str]) -> None:
        """Take part in a step whose blocks only read, of which others may write in other steps.

        Args:
            reads: the locations that the step's blocks may ask for.
        """
        if self.reads is None:
            # What they wait for behind this step, its next reply says.
            self.waits, self.observed, self.begins = {}, reads, True

    @property
    def asks_nothing(self) -> bool:
        """Whether none of the requests of the step has a block that asks for something, as a reply has said."""
        calm = self.calm
        return calm is not None and calm[0] == self.arrivals and self.present <= calm[1]

    def passes(self, location: str) -> bool:
        """Count a location that the model has reached. Returns whether the model must wait for the host there."""
        after = self.waits.get(location)
        if not after:
            return after == 0
        self.waits[location] = after - 1
        return False

    def read(self, share: HostShare, readings: list[Reading], passed: Any) -> None:
        """Tell it its traces' rows of what the step has reached.

        Args:
            share: what it gets of the step.
            readings: one of the share's parts.
            passed: the numbers of the locations that the model has passed in the step.

        Raises:
            NoRoom: the host has not read enough of what was shared before.
        """
        given = share.give(readings, self.process.given)
        if given is None:
            raise NoRoom
        start, rows = given
        self._tell_again()
        untold = _UntoldReadings(share, readings, start, passed, self._passed)
        self._late.append(rows)
        if self._told.may_repeat(share.given, self._events):
            # The step's end shows whether all of it is as before.
            self._again = untold
        else:
            self._passed = untold.through
            self._events += untold.events()
            self._told.read(share.given)

    def read_again(self, step: StagedStep, passed: Any) -> bool:
        """Tell it all of its rows of a step at once, as `read` does.

        Returns:
            Whether the step may be like the one before, as far as is known before its end, and the host has room for
            it. If not, nothing was told.
        """
        given = step.given(self)
        if given is None or self._again is not None or not self._told.may_repeat(given, self._events):
            return False
        share = step.share_of(self)
        placed = share.give([], self.process.given)
        if placed is None:
            return False
        start, rows = placed
        self._late.append(rows)
        self._again = _UntoldReadings(share, [], start, passed, self._passed)
        return True

    def end(self, passed: Any) -> None:
        """End the step."""
        self.shared = None
        again = self._again
        if again is not None and self._told.repeats(self._events, passed):
            self._events[-1:], self._again = [Repeated(again.start)], None
            return
        self._tell_again()
        self._events.append(Ended(passed[self._passed :].tobytes()))
        self._told.end(passed)

    def _tell_again(self) -> None:
        """Tell it what `end` was to find the same as in the step before."""
        again, self._again = self._again, None
        if again is not None:
            self._events += again.events()
            self._passed = again.through
            self._told.read(again.share.given)

    def drop_untold(self) -> None:
        """Give up what no turn has."""
        late, self._late, self._events, self._again = self._late, [], [], None
        for rows in late:
            rows.drop()

    @property
    def untold(self) -> bool:
        """Whether there are events that no turn has."""
        return bool(self._events)

    def tell(self, event: Event) -> None:
        """Add an event to the next turn."""
        self.untrusted.ends += isinstance(event, Finished)
        self._events.append(event)

    @property
    def queued(self) -> bool:
        """Whether turns wait for their rows."""
        return self.late_turns != self.late_sent

    def turn(self, names: list[str], *, waits: bool = False) -> LateTurn:
        """Take what it was not told into a turn. `names` and `waits` are as for `send`."""
        self._tell_again()
        turn = Turn(self._events, waits, names[self._names :], self.process.given.taken)
        turn.large_allowed = self.allowed()
        # What blocks do as a step begins, the stream may soon wait for.
        turn.limited = self.visited and any(type(event) is Began for event in self._events)
        self._events, self._names = [], len(names)
        made = LateTurn(self, turn, self._late)
        self._late = []
        return made

    def send(self, names: list[str], *, waits: bool, later: bool = False) -> LateTurn | None:
        """Send a turn, if nothing of it is on its way from a GPU, and no turn before it waits for that.

        Args:
            names: of all locations that any event has numbered.
            waits: whether a reply is wanted. Then this waits for what is on its way.
            later: whether the turn may be sent together with the next one.

        Returns:
            The turn, if it is not sent yet.

        Raises:
            ChannelClosed: the host is gone.
        """
        made = self.turn(names, waits=waits)
        if not waits and (later or self.queued or not made.ready):
            return made
        made.send()
        return None

    def took(self, turns: int, mark: int) -> None:
        """Note how many turns the host has taken, and how many shared bytes it has read."""
        with self._lock:
            if self.taken < turns <= self.turns:
                self.taken, self.owes_since = turns, time.monotonic()
            given = self.process.given
            given.returned = max(given.returned, min(mark, given.taken))

    def worked(self, used_us: int, steps: int = 1) -> None:
        """Note for how long the host says that it has worked in a step, in microseconds; 0 if it says nothing.

        Args:
            used_us: the time.
            steps: of how many steps it is the mean.
        """
        if used_us and self.kind is not None:
            self.load.measured(used_us, self.accounts.reads + self.accounts.writers, steps)

    def owes(self, seconds: float) -> bool:
        """Whether the host has not taken a turn for this long, although it was sent one."""
        return self.taken < self.turns and time.monotonic() - self.owes_since > seconds

    def withholds(self, seconds: float) -> bool:
        """Whether the host has not reported the end of a request for this long since the scheduler has ended it."""
        before = time.monotonic() - seconds
        return any(one.finished and not one.over and one.finished_at < before for one in list(self.records.values()))

    def take(self, reply: Reply) -> None:
        """Take a reply's account of what the blocks wait for."""
        self.waits = dict(reply.waits)
        self.observed, self.begins = frozenset(reply.observed), reply.begins
