"""Serves the locations of a step to blocks that write, while the model's thread goes on.

A stream copies the rows of these blocks to the host's memory, waits there, and copies the rows back. A thread tells the
hosts of the rows, takes their replies, puts the rows that blocks leave among the others, and releases the stream.
Meanwhile the model's thread launches what comes behind, and prepares the next step.

What blocks have changed in place goes back to the model's own tensors. What they have assigned goes to copies of these,
with which the model goes on: other modules may still use its own ones.

So the model's thread does not know what the blocks wait for next. It need not: their source says where they may ask for
something (`Account.edits`), and the stream waits at each of these locations in every step. A host whose blocks ask for
another one is ended, since the model has gone on.

All that these hosts are told goes through the thread, in order. It calls no driver (see `stream_flags.py`), and it
releases the stream whatever happens.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from tracewire_engine.link.shared_rows import SharedValueError
from tracewire_engine.link.thread_names import name_thread
from tracewire_engine.protocol.block_host import Reply, Request, Shape
from tracewire_engine.worker.switch_interval import set_switch_interval

from .host import BlockHost, LateTurn
from .host_replies import Patience, wait_for_replies
from .report_thread import ReportThread, lost, lost_by
from .row_buffer import RowBuffer
from .staged_step import Fit, Staged, StagedStep
from .stream_flags import StreamFlags

__all__ = ["StreamVisits", "Visit"]

logger = logging.getLogger("vllm.tracewire")

#: How long the thread sleeps before it looks again whether the stream has arrived, in seconds; how much earlier than
#: the last times it begins to look; and how long it sleeps at most before that.
_LOOK_S, _EARLY_S, _LONGEST_S = 0.00005, 0.0002, 0.005

#: After how many looks it looks less often, and how long it sleeps then, in seconds.
_LOOKS, _SELDOM_S = 100, 0.0003

#: After how long the model's thread hands over the interpreter while a stream waits, in seconds.
_SWITCH_S = 0.00005

#: How much of the last stream's time counts when the next one's is estimated.
_WEIGHT = 0.25

_SET_TIMER_SLACK = 29

_said: msgspec.msgpack.Decoder[Reply | Request] = msgspec.msgpack.Decoder(Reply | Request)


class Visit:
    """A location at which the stream waits for hosts.

    Args:
        step: with the value as its only reading.
        hosts: that have blocks which may want it.
        patience: of the model's step.
    """

    def __init__(self, step: StagedStep, hosts: Sequence[BlockHost], patience: Patience) -> None:
        self.step, self.patience = step, patience
        #: What each host is told, with its rows. The model's thread makes them.
        self.turns: Sequence[LateTurn] = ()
        (self._reading,) = step.readings
        self.number = 0
        self.since = 0.0
        #: Where blocks of each host may ask for something.
        self.edits = {host: host.account.edits or frozenset() for host in hosts}
        #: For each host, how many requests it was told of, and those of its requests that are in the step.
        self.requests = {host: (host.arrivals, host.present) for host in hosts}
        #: What the model goes on with, by the memory of what blocks change in place: that, and what they assign.
        self._assigned: dict[RowBuffer, RowBuffer] = {}
        if any(host.account.assigns for host in hosts):
            buffers = {one.buffer for one in self._reading.tensors}
            self._assigned = {one: RowBuffer.take(one.size, pinned=one.pinned) for one in buffers}
        #: Tensors that take the place of the model's.
        self._fresh: list[torch.Tensor] = []

    def begin(self, value: Any) -> None:
        """Have the stream copy what `put_back` needs, so that memory runs out before the stream waits, if at all."""
        if self._assigned:
            values = value if type(value) is tuple else (value,)
            for place, one in zip(self._reading.places, self._reading.tensors, strict=True):
                self._fresh.append(torch.empty_like(values[place]))
                if one.form.size:
                    self._assigned[one.buffer].copy(one.form.kept(values[place]), one.start)

    def put_back(self, value: Any) -> Any:
        """Have the stream put what blocks leave into the model's value. Returns what the model goes on with."""
        values = value if type(value) is tuple else (value,)
        left = list(values)
        for number, (place, one) in enumerate(zip(self._reading.places, self._reading.tensors, strict=True)):
            tensor = left[place]
            if one.form.axis >= 0 and one.form.size:
                self._copy_back(one, one.buffer, tensor)
                if self._assigned:
                    left[place] = self._fresh[number]
                    left[place].copy_(tensor)
                    self._copy_back(one, self._assigned[one.buffer], left[place])
        return tuple(left) if type(value) is tuple else left[0]

    @staticmethod
    def _copy_back(one: Staged, buffer: RowBuffer, tensor: torch.Tensor) -> None:
        kept = one.form.kept(tensor)
        kept.copy_(buffer.tensor(kept.dtype, kept.shape, one.start), non_blocking=True)

    def put(self, replies: Mapping[BlockHost, Reply], fail: Callable[[BlockHost, Exception], None]) -> None:
        """Put the rows that blocks leave among the others: first what they have changed in place, and then the rest.

        Args:
            replies: of the hosts.
            fail: takes an error of a host's rows, such as rows that do not fit. None of these are put in then, and none
                of those behind them.
        """
        for assigned in (False, True):
            for host, reply in replies.items():
                if host.failure is None:
                    try:
                        self._put(host, reply, assigned=assigned)
                    except Exception as error:
                        fail(host, error)

    def _put(self, host: BlockHost, reply: Reply, *, assigned: bool) -> None:
        memory, given = host.process.returned, self._given(host, reply) if assigned else reply.edited
        memory.check_apart([shape for _, shape in given])
        parts = [self._part(host, index, shape) for index, shape in given]
        if len({index for index, _ in given}) < len(given):
            raise SharedValueError("a tensor was changed twice")
        for one, fit, shape in parts:
            form = one.form
            # What belongs to no request, no request's block may change.
            if form.axis >= 0 and form.row:
                buffers = [self._assigned[one.buffer]] if self._assigned else []
                rows = memory.rows(shape.start, fit.shape[form.axis], form.row)
                if not assigned:
                    # The only copy of what the host has written: what it writes there later changes nothing.
                    rows = rows.copy()
                    buffers.append(one.buffer)
                for buffer in buffers:
                    held = buffer.array[one.start : one.start + form.size].reshape(form.count, form.row)
                    held[fit.index] = rows

    def _part(self, host: BlockHost, index: int, shape: Shape) -> tuple[Staged, Fit, Shape]:
        """A tensor, a host's rows of it, and where the host has left them in its memory."""
        if not 0 <= index < len(self._reading.tensors):
            raise SharedValueError(f"the value has no tensor {index}")
        one, fit = self._reading.tensors[index], self.step.fits(host, self._reading)[1][index]
        if (shape.dtype, tuple(shape.shape)) != (one.form.dtype, tuple(fit.shape)):
            raise SharedValueError(f"rows {list(fit.shape)} of {one.form.dtype} are replaced by others")
        host.process.returned.check(shape)
        return one, fit, shape

    def _given(self, host: BlockHost, reply: Reply) -> list[tuple[int, Shape]]:
        """The tensors of a value that blocks have assigned, each with its place in the model's value."""
        if reply.replaced is None:
            return []
        if not host.account.assigns:
            raise SharedValueError("a value is replaced, of which the block's source says nothing")
        form, tensors = reply.replaced.skeleton, reply.replaced.tensors
        if form != self._reading.skeleton or len(tensors) != len(self._reading.tensors):
            raise SharedValueError("a value is replaced by one of another form")
        return list(enumerate(tensors))

    def leave(self) -> None:
        """Give up the memory: the stream has copied all of it."""
        self.step.leave()
        for buffer in self._assigned.values():
            buffer.give_back()


class StreamVisits:
    """The visits of a stream, and the thread that serves them.

    Args:
        flags: of the stream.
        reports: passes on what hosts report.
    """

    def __init__(self, flags: StreamFlags, reports: ReportThread) -> None:
        self._flags, self._reports = flags, reports
        reports.is_held = lambda: bool(self._held)
        #: Whether streams wait for hosts: not any more, once one of them has waited in vain.
        self.usable = True
        self._number = 0
        self._jobs: deque[LateTurn | Visit] = deque()
        self._changed = threading.Condition()
        self._busy = False
        #: Visits whose rows the stream may still copy back.
        self._held: deque[Visit] = deque()
        #: How long streams take to arrive, in seconds; and when the last one was released.
        self._usual_s = self._released_at = 0.0
        self._usual_switch_s = sys.getswitchinterval()
        threading.Thread(target=self._run, name="tracewire visits", daemon=True).start()

    # --- on the model's thread ----------------------------------------------------------------------------------------

    def tell(self, turn: LateTurn) -> None:
        """Send a turn, behind what the hosts are told before."""
        self._add(turn)

    def visit(self, visit: Visit, value: Any) -> Any:
        """Have the stream wait for hosts. Returns the value as blocks leave it.

        Args:
            visit: to which the value's rows are on their way, and that has begun.
            value: the model's.
        """
        if not self._held:
            # While the GPU waits, the thread gets the interpreter soon. The model's thread is ahead.
            set_switch_interval(_SWITCH_S)
        self._number += 1
        visit.number, visit.since = self._number, time.monotonic()
        self._flags.arrive(visit.number)
        self._held.append(visit)
        self._add(visit)
        try:
            self._flags.hold(visit.number)
            return visit.put_back(value)
        finally:
            self._flags.go_on(visit.number)

    def give_back(self) -> None:
        """Give up the memory of visits that are over."""
        while self._held and self._flags.has_passed(self._held[0].number):
            visit = self._held.popleft()
            if self._flags.expired_last(visit.number):
                self._give_up(visit)
            visit.leave()
            if not self._held:
                set_switch_interval(self._usual_switch_s)

    def settle(self) -> None:
        """Wait until the hosts are told all, and no stream waits for them."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs and not self._busy)

    def _add(self, job: LateTurn | Visit) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    # --- on the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        name_thread("visits")
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._jobs)
                self._busy = True
                job = self._jobs.popleft()
                turns = [job] if isinstance(job, LateTurn) else []
                while turns and self._jobs and isinstance(following := self._jobs[0], LateTurn):
                    turns.append(following)
                    self._jobs.popleft()
            try:
                if isinstance(job, Visit):
                    self._serve(job)
                else:
                    self._send_joined(turns)
            except Exception:  # it serves all traces
                logger.exception("the hosts of blocks could not be told")

    def _send_joined(self, turns: list[LateTurn]) -> None:
        joined: dict[BlockHost, LateTurn] = {}
        for turn in turns:
            first = joined.setdefault(turn.host, turn)
            if first is not turn:
                first.join(turn)
        for turn in joined.values():
            self._send(turn)

    def _send(self, turn: LateTurn) -> bool:
        """Send a turn. Returns whether its host is there."""
        host = turn.host
        if host.failure is None:
            try:
                turn.send()
                return True
            except Exception as error:  # it costs the host, not the engine
                self._reports.end(host, lost_by(error, host))
        turn.drop()
        return False

    def _serve(self, visit: Visit) -> None:
        try:
            self._await_stream(visit)
            self._ask(visit)
        except Exception:  # it costs what the blocks have changed, not the engine
            logger.exception("the hosts of blocks could not be asked")
            for turn in visit.turns:
                turn.drop()
                self._reports.end(turn.host, lost("the engine could not ask it", len(turn.host.traces)))
        finally:
            self._flags.release(visit.number)
            self._released_at = time.monotonic()
        if self._flags.expired(visit.number):
            self._give_up(visit)

    def _give_up(self, visit: Visit) -> None:
        """End the hosts of a visit for which the stream has waited in vain."""
        self.usable = False
        logger.error("the GPU has waited for the hosts of blocks in vain; from now on the model's thread waits")
        for turn in visit.turns:
            self._reports.end(turn.host, lost("the model has gone on without it", len(turn.host.traces)))

    def _await_stream(self, visit: Visit) -> None:
        """Wait until the stream has arrived. The first sleep ends before that, by the times of the last visits."""
        flags, began, looks = self._flags, max(visit.since, self._released_at), 0
        pause = first = max(_LOOK_S, self._usual_s - _EARLY_S - (time.monotonic() - began))
        while not flags.has_arrived(visit.number):
            time.sleep(min(pause, _LONGEST_S))
            looks += 1
            pause = _LOOK_S if looks < _LOOKS else _SELDOM_S
        if looks <= 1 and (looks == 0 or first > _LOOK_S):
            # Perhaps it was there long before.
            self._usual_s /= 2
        else:
            took = min(time.monotonic() - began, 2 * self._usual_s + _LONGEST_S)
            self._usual_s += _WEIGHT * (took - self._usual_s)
        visit.step.arrive()

    def _ask(self, visit: Visit) -> None:
        marks = {turn.host: turn.mark for turn in visit.turns if self._send(turn)}

        def take(host: BlockHost) -> Reply | None:
            return self._reply(host, marks[host], visit)

        def misfit(host: BlockHost, error: Exception) -> None:
            self._reports.end(host, lost(str(error), len(host.traces)))

        visit.put(wait_for_replies(list(marks), visit.patience, take, self._reports.end), misfit)

    def _reply(self, host: BlockHost, mark: int, visit: Visit) -> Reply | None:
        for message in host.calls.arrived():
            said = _said.decode(message)
            if isinstance(said, Request):
                raise SharedValueError(f"its block needs {said.path[:200]!r}, of which its source says nothing")
            host.took(host.turns, mark)
            self._count(host, visit.patience.step, said.used_us)
            unknown = {where for where, _ in said.waits}.union(said.observed) - visit.edits[host]
            if unknown:
                raise SharedValueError(f"its block asks for {min(unknown)[:200]!r}, of which its source says nothing")
            host.calm = None if said.waits or said.observed or said.begins else visit.requests[host]
            return said
        return None

    @staticmethod
    def _count(host: BlockHost, step: int, used_us: int) -> None:
        """Note how long a host has worked for a reply, and tell it of the whole step before once the next one comes."""
        if host.visited_step != step:
            host.worked(host.visited_us)
            host.visited_step, host.visited_us = step, 0
        host.visited_us += used_us
