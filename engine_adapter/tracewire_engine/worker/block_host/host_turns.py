"""What the worker tells the hosts of blocks within a step, and how long the model waits for them."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec
import torch

from tracewire_bus.wire.messages import Failure
from tracewire_engine.link.shared_rows import CopiedRows, SharedValueError
from tracewire_engine.protocol.block_host import SOURCE, Reply, Request

from .answers import ModelAnswers
from .host import BlockHost
from .host_replies import Patience, wait_for_replies
from .rank_link import Edit, edit_of
from .reading import MOST_VISITED
from .report_thread import ReportThread, lost, lost_by
from .rows import NoRoom, SharedRows, StepRows
from .staged_step import StagedStep, StageLayout
from .stream_visits import StreamVisits, Visit
from .untrusted_reports import DEEPEST, values_in

__all__ = ["HostTurns", "parts_of"]

logger = logging.getLogger("vllm.tracewire")

#: How many values of msgpack a reply may have.
_MOST_VALUES = 1 << 16

_encode = msgspec.msgpack.Encoder().encode
_said: msgspec.msgpack.Decoder[Reply | Request] = msgspec.msgpack.Decoder(Reply | Request)


class HostTurns:
    """The turns of all hosts in a step.

    Args:
        model: nnsight's model, of which blocks may call modules and read attributes.
        reports: passes on what hosts report.
        step_s: how long the model waits for all blocks of a step, in seconds.
        visits: if a stream can wait for hosts.
    """

    def __init__(self, model: Any, reports: ReportThread, step_s: float, visits: StreamVisits | None = None) -> None:
        #: Answers what hosts ask for.
        self.answers = ModelAnswers(model)
        self._reports, self._step_s, self._visits = reports, step_s, visits
        #: The locations whose values no stream can put back.
        self._unfit: set[str] = set()
        self._patience = Patience(step_s)
        #: The locations that the model has passed in the step, by their numbers.
        self.passed: array[int] = array("H")
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}
        #: Hosts that have not been told of the ends of requests.
        self.ending: set[BlockHost] = set()
        #: Of steps that are laid out as this one, by the hosts.
        self._layouts: dict[tuple[BlockHost, ...], StageLayout] = {}

    def lay_out(self) -> None:
        """Begin a step that is laid out in another way than the one before."""
        self._layouts.clear()

    def stage(self, rows: dict[BlockHost, StepRows], *, pinned: bool, expected: int = 0) -> StagedStep:
        """A step's values for these hosts, each of which has these rows (see `StagedStep`)."""
        hosts = tuple(rows)
        layout = self._layouts.get(hosts)
        if layout is None:
            layout = self._layouts[hosts] = StageLayout(rows)
        return StagedStep(layout, pinned=pinned, expected=expected)

    def begin_step(self) -> None:
        """Begin a step: the model has passed nothing, and waited for nothing."""
        self._patience = Patience(self._step_s, self._patience.step + 1)
        self.passed = array("H")
        if self._visits is not None:
            self._visits.give_back()

    def number(self, location: str) -> int:
        """The number of a location in messages to hosts."""
        number = self._numbers.get(location)
        if number is None:
            number = self._numbers[location] = len(self._names)
            self._names.append(location)
        return number

    def share_with(
        self, hosts: Iterable[BlockHost], location: str, value: Any, *, pinned: bool, by_request: bool
    ) -> list[BlockHost]:
        """Share a value with the hosts that want something at a location. Returns those for which the model waits.

        Args:
            hosts: that may want something.
            location: where the model has reached the value.
            value: the model's.
            pinned: whether it may lie on a GPU.
            by_request: as in `Reached`.
        """
        waiting, wanting = [], {}
        for host in hosts:
            waits = host.passes(location)
            if waits:
                waiting.append(host)
            if (waits or location in host.observed) and host.rows is not None:
                wanting[host] = host.rows
        if wanting:
            self._share(wanting, location, value, pinned=pinned, by_request=by_request)
        return [host for host in waiting if host.failure is None]

    def _share(
        self, rows: dict[BlockHost, StepRows], location: str, value: Any, *, pinned: bool, by_request: bool
    ) -> None:
        """Share a value with these hosts, each of which has these rows."""
        hosts, inside = list(rows), f".{SOURCE}." in location
        step = self.stage(rows, pinned=pinned)
        try:
            step.reach(location, value, hosts, len(self.passed), by_request=by_request, rows_only=inside)
        except Exception as error:  # it costs the hosts, not the engine
            for host in hosts:
                self.misshared(host, location, error)
        else:
            self.give(hosts, step)
            for host, own in rows.items():
                host.shared = SharedRows(value, own, by_request=by_request, rows_only=inside)
        finally:
            step.leave()

    # --- where a stream waits -----------------------------------------------------------------------------------------

    def is_visited(self, host: BlockHost) -> bool:
        """Whether the stream waits for a host in the step that begins, where the model's thread would."""
        visits, edits = self._visits, host.account.edits
        fit = edits is not None and len(edits) <= MOST_VISITED and edits.isdisjoint(self._unfit)
        if visits is not None and visits.usable and edits is not None and fit:
            if not host.visited:
                self._reports.send_now((host,))
            host.visited = True
            host.only_read(frozenset() if host.asks_nothing else edits)
            # So that it begins the step while the model does.
            self.send(host)
        else:
            self._wait_for([host])
        return host.visited

    def _wait_for(self, hosts: Iterable[BlockHost]) -> None:
        """Have the model's thread wait for these hosts from now on. They are told first what they were to be told."""
        visited = [host for host in hosts if host.visited]
        if visited and self._visits is not None:
            self._visits.settle()
        for host in visited:
            host.visited = False

    def visit(
        self, hosts: list[BlockHost], location: str, value: Any, *, pinned: bool, by_request: bool
    ) -> tuple[Any, list[BlockHost]]:
        """Have the stream wait for those of some hosts that are visited.

        Args:
            hosts: that want something at a location; the others are as for `share_with`.

        Returns:
            The value as blocks of these hosts leave it, and the hosts for which no stream waits.
        """
        rows = {host: host.rows for host in hosts if host.visited and host.rows is not None}
        if not rows or self._visits is None:
            return value, hosts
        step, visits = self.stage(rows, pinned=pinned), False
        # What a host changes in place, for which the thread waits, belongs into the model's own tensors, too.
        beside = any(not host.visited and host.reads is None for host in hosts)
        try:
            fits = step.is_apart(value, by_request=by_request)
            if not fits or (beside and any(host.account.assigns for host in rows)):
                self._unfit |= set() if fits else {location}
                self._wait_for(rows)
                for host in rows:
                    host.waits = {location: 0}
                return value, hosts
            passed, parts = len(self.passed), parts_of(rows, location)
            step.reach(location, value, list(rows), passed, by_request=by_request, parts=parts)
            for host in rows:
                share = step.share_of(host)
                for readings in share.parts():
                    self._with_room(host, location, partial(host.read, share, readings, self.passed))
            waiting = [host for host in rows if host.failure is None]
            if waiting:
                visit = Visit(step, waiting, self._patience)
                visit.begin(value)
                visit.turns = [host.turn(self._names, waits=True) for host in waiting]
                visits = True
                value = self._visits.visit(visit, value)
        except Exception as error:  # it costs the hosts, not the engine
            for host in rows:
                self.misshared(host, location, error)
        finally:
            if not visits:
                step.leave()
        return value, [host for host in hosts if host not in rows]

    # --- what hosts are told ------------------------------------------------------------------------------------------

    def give(self, hosts: Iterable[BlockHost], step: StagedStep, *, whole: bool = False) -> None:
        """Tell hosts what the step has reached: all that it has staged for them, if `whole`."""
        if whole:
            step.compare()
        step.seal()
        for host in hosts:
            if host.failure is None and not self._give_again(host, step):
                share = step.share_of(host)
                for readings in share.parts():
                    self._with_room(host, readings[0].location, partial(host.read, share, readings, self.passed))

    def _give_again(self, host: BlockHost, step: StagedStep) -> bool:
        """Tell a host its rows, if the step may be like the one before. Returns whether nothing is left to be told."""
        try:
            return host.read_again(step, self.passed)
        except Exception as error:  # it costs the host, not the engine
            self.misshared(host, step.readings[0].location, error)
            return True

    def _with_room(self, host: BlockHost, location: str, share: Callable[[], None]) -> None:
        """Share something with a host, as soon as it has room for it."""
        began, behind = time.monotonic(), host.visited
        while host.failure is None:
            try:
                share()
                return
            except NoRoom:
                if behind and self._visits is not None:
                    # The stream may not have come to what the host was to read before. That is no time of its blocks.
                    self._visits.settle()
                    began, behind = time.monotonic(), False
                elif host.untold:  # the rows of this step take more than is shared
                    self.send(host)
                    continue
                left = self._patience.left_s(host) - (time.monotonic() - began)
                if left <= 0:
                    self.fail(host, self._patience.over(host))
                else:
                    self._reports.wait_for_reports(left)
            except Exception as error:  # it costs the host, not the engine
                self.misshared(host, location, error)
        spent = time.monotonic() - began
        self._patience.spend(spent)
        self._patience.spend_for(host, spent)

    def misshared(self, host: BlockHost, location: str, error: Exception) -> None:
        """End a host that needs a value that cannot be shared."""
        why = f"{location} cannot be shared: {type(error).__name__}: {error}"
        self.fail(host, lost(why, len(host.traces)))

    def send(self, host: BlockHost, *, waits: bool = False, later: bool = False) -> bool:
        """Send a host what it has not been told, and whether the model waits for its reply.

        Args:
            host: of blocks.
            waits: whether the model waits.
            later: whether it may be told together with what comes next.

        Returns:
            Whether the host is there.
        """
        if host.visited and self._visits is not None:
            self._visits.tell(host.turn(self._names))
            return True
        if waits:
            self._reports.send_now((host,))
        try:
            turn = host.send(self._names, waits=waits, later=later)
        except Exception as error:  # it costs the host, not the engine
            self.fail(host, lost_by(error, host))
            return False
        if turn is not None:
            self._reports.send_later(turn)
        return True

    def tell_ahead(self, hosts: list[BlockHost]) -> None:
        """Send these hosts what they have not been told, so that they begin the step while the model does."""
        for host in hosts:
            self.send(host)
        self._reports.send_ready(hosts)

    def tell_ends(self) -> None:
        """Tell hosts of the ends of requests, and have what they report of them passed on at once."""
        if self.ending:
            ending, self.ending = self.ending, set()
            hosts = [host for host in ending if host.failure is None]
            for host in hosts:
                self.send(host)
            self._reports.send_now(hosts)
            self._reports.hurry()

    def ask(self, hosts: list[BlockHost]) -> list[tuple[BlockHost, Reply]]:
        """Send these hosts what they have not been told, and wait for their replies."""
        asked = [host for host in hosts if self.send(host, waits=True)]
        return list(wait_for_replies(asked, self._patience, self._reply, self.fail).items())

    def _reply(self, host: BlockHost) -> Reply | None:
        """Take what a host has said. Returns its reply, if it has come."""
        messages = host.calls.arrived()
        if len(messages) > 1:
            # A host waits for each answer. Others would be given while the model waits, whatever its patience is.
            raise SharedValueError(f"it has sent {len(messages)} messages, where one was awaited")
        for message in messages:
            said = _said.decode(message)
            if isinstance(said, Reply):
                # What it leaves goes to other ranks, too.
                if len(message) > DEEPEST and values_in(memoryview(message), DEEPEST, _MOST_VALUES) > _MOST_VALUES:
                    raise SharedValueError(f"a reply of more than {_MOST_VALUES} values")
                host.took(host.turns, host.process.given.taken)
                host.replied_us += said.used_us
                if host.reads is None:
                    host.take(self.answers.known(said))
                return said
            host.calls.send(_encode(self.answers.answer(host.process, said)))
        return None

    def fail(self, host: BlockHost, failure: Failure) -> None:
        """End a host that is gone, or of no use any more."""
        host.drop_untold()
        self._reports.end(host, failure)

    def copied(
        self, replies: list[tuple[BlockHost, Reply]]
    ) -> tuple[list[tuple[BlockHost, Reply]], list[Edit], torch.Tensor]:
        """What hosts leave at a location, in copies: their replies, the edits, and the bytes of the tensors of both."""
        copies, left, edits = CopiedRows(), [], []
        for host, reply in replies:
            try:
                assert host.rows is not None
                if reply.edited or reply.replaced is not None:
                    edits.append(edit_of(host.present, host.rows, reply, host.process.returned, copies))
                    left.append((host, edits[-1].reply))
            except Exception as error:  # it costs the host, not the engine
                self.misfit(host, error)
        return left, edits, copies.bytes()

    def misfit(self, host: BlockHost, error: Exception) -> None:
        """End a host that leaves what cannot be put into the model's value, such as rows that do not fit."""
        self.fail(host, lost(str(error), len(host.traces)))


def parts_of(hosts: Iterable[BlockHost], location: str) -> frozenset[int] | None:
    """The items that blocks of hosts use of a tuple at a location; `None` for all."""
    found: frozenset[int] | None = None
    for host in hosts:
        parts = host.account.parts.get(location)
        if parts is None:
            return None
        found = parts if found is None or found == parts else found | parts
    return found
