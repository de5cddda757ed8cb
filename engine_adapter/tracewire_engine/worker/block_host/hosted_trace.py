"""A trace whose blocks run in a host: what the worker knows of it, and what it still has to tell its host."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from tracewire_bus.wire.messages import Failure
from tracewire_engine.link.host_channel import HostChannel
from tracewire_engine.protocol.block_host import (
    Arrived,
    Began,
    Ended,
    Event,
    Reached,
    Reply,
    Turn,
)

from .late_copies import LateCopies, LateRows
from .pool import HostProcess
from .rows import SharedRows, StepRows

__all__ = ["HostedRequest", "HostedTrace"]

_encode = msgspec.msgpack.Encoder().encode


class HostedRequest:
    """A live request of a trace: the adapter's id of it, its choice, and what was reported of it."""

    __slots__ = ("choice", "ended", "finished", "id", "index", "over", "request", "steps")

    def __init__(self, request_id: str, request: str, choice: int) -> None:
        self.id, self.request, self.choice = request_id, request, choice
        #: The index of the token of the last step that its host has reported, and how many steps those were.
        self.index, self.steps = -1, 0
        #: Whether its blocks have ended it, whether the scheduler has, and whether its end was reported.
        self.ended = self.finished = self.over = False


class HostedTrace:
    """One trace and its host.

    `reads` are the locations that its blocks may ask for, if it is certain that they only read. Then the model never
    waits for the host. `None`: the model waits wherever a block asks for something.
    """

    def __init__(self, name: str, host: HostProcess, reads: frozenset[str] | None, choices: int) -> None:
        self.name, self.host, self.reads, self.choices = name, host, reads, choices
        #: All requests that the host was told of, by the scheduler's id.
        self.requests: dict[str, HostedRequest] = {}
        #: The same by the adapter's id and the choice, as records name them; and the names of shared values' records.
        self.records: dict[tuple[str, int], HostedRequest] = {}
        self.shared_names: set[str] = set()
        self.new: list[Arrived] = []
        self.failure: Failure | None = None
        self.rows: StepRows | None = None
        #: Locations at which the model waits, and how often it passes each before; and those of which rows are sent.
        self.waits: dict[str, int] = {}
        self.observed: frozenset[str] = reads or frozenset()
        self.begins = False
        #: Whether its host asks the worker for something when it takes a block, also if the block only reads.
        self.asks = False
        self.idle_since = 0.0
        #: Whether the worker will see no more request of it; and whether its host is gone because all are over.
        self.complete = self.closed = False
        #: The location that was reached last, until the host has answered.
        self.shared: SharedRows | None = None
        #: How many turns the host was sent, how many of them it has taken, and since when it owes the others.
        self.turns = self.taken = 0
        self.owes_since = 0.0
        self._events: list[Event] = []
        self._names = self._passed = 0
        #: Rows of the next turn that are on their way from a GPU; and how many turns wait for theirs.
        self._late: list[LateRows] = []
        self.queued = 0

    def add(self, arrived: Arrived, request: HostedRequest) -> None:
        """Take a new request."""
        self.new.append(arrived)
        self.requests[request.id] = self.records[request.request, request.choice] = request

    def join(self, reads: frozenset[str] | None) -> None:
        """Take another request's account of what its blocks may ask for."""
        self.reads = None if reads is None or self.reads is None else self.reads | reads
        self.observed |= self.reads or frozenset()

    @property
    def calls(self) -> HostChannel:
        """The connection over which the host takes turns."""
        return self.host.calls

    @property
    def wanted(self) -> set[str]:
        """The locations at which the model does something for this trace."""
        return {*self.waits, *self.observed}

    def begin(self, spans: list[tuple[str, int, int]], rows: StepRows) -> None:
        """Begin a step with requests of this trace (see `Began`)."""
        self.rows, self._passed = rows, 0
        self._events.append(Began(self.new, spans))
        self.new = []

    def passes(self, location: str) -> bool:
        """Count a location that the model has reached. Returns whether the model must wait for the host there."""
        after = self.waits.get(location)
        if not after:
            return after == 0
        self.waits[location] = after - 1
        return False

    def reach(
        self, location: str, value: Any, passed: Any, *, by_request: bool, copies: LateCopies | None = None
    ) -> None:
        """Share the trace's rows at a location (see `SharedRows`).

        Raises:
            NoRoom: the host has not read enough of what was shared before.
            SharedValueError: the value cannot be shared.
        """
        assert self.rows is not None
        shared = SharedRows(value, self.rows, self.host.given, by_request=by_request, copies=copies)
        self._late += shared.late
        before = passed[self._passed :].tobytes()
        self._events.append(Reached(location, shared.shared, before, by_request))
        # The host counts the location itself.
        self._passed = len(passed) + 1
        self.shared = shared

    def end(self, passed: Any) -> None:
        """End the step."""
        self.shared = None
        self._events.append(Ended(passed[self._passed :].tobytes(), self.host.given.taken))

    def tell(self, event: Event) -> None:
        """Add an event to the next turn."""
        self._events.append(event)

    def send(self, names: list[str], *, waits: bool) -> Callable[[], None] | None:
        """Send a turn, if nothing of it is on its way from a GPU.

        Args:
            names: of all locations that any event has numbered.
            waits: whether a reply is wanted. Then this waits for what is on its way.

        Returns:
            A function that waits for what is on its way and then sends the turn; `None` if the turn was sent.

        Raises:
            ChannelClosed: the host is gone.
        """
        turn = Turn(self._events, waits, names[self._names :])
        self._events, self._names = [], len(names)
        if self.turns == self.taken:
            self.owes_since = time.monotonic()
        self.turns += 1
        late, self._late = self._late, []
        send = partial(self._send, _encode(turn), late)
        if not waits and (late or self.queued):
            return send
        send()
        return None

    def _send(self, message: bytes, late: list[LateRows]) -> None:
        for rows in late:
            rows.arrive(self.host.given)
        self.calls.send(message)

    def took(self, turns: int, mark: int) -> None:
        """Note how many turns the host has taken, and how many shared bytes it has read."""
        if self.taken < turns <= self.turns:
            self.taken, self.owes_since = turns, time.monotonic()
        given = self.host.given
        given.returned = max(given.returned, min(mark, given.taken))

    def owes(self, seconds: float) -> bool:
        """Whether the host has not taken a turn for this long, although it was sent one."""
        return self.taken < self.turns and time.monotonic() - self.owes_since > seconds

    def take(self, reply: Reply) -> None:
        """Take a reply's account of what the blocks wait for."""
        self.waits = dict(reply.waits)
        self.observed, self.begins = frozenset(reply.observed), reply.begins
