"""Runs blocks in a process of their own: takes the worker's turns, and answers them."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from nnsight.intervention.envoy import Envoy
from nnsight.intervention.source import NO_SKIP, SourceNotAvailable
from nnsight.tracing.tracer import inc

from tracewire_engine.link.described_objects import made
from tracewire_engine.link.host_channel import ChannelClosed, ChannelTimeout, HostChannel
from tracewire_engine.link.shared_rows import RowMemory, SharedValueError, pack_value, unpack_value
from tracewire_engine.protocol.block_host import (
    MOST_SAID,
    Answer,
    Began,
    Chunk,
    EditsFailed,
    Ended,
    Finished,
    Generated,
    HostSettings,
    Reached,
    Reply,
    Reported,
    Request,
    Saved,
    Shape,
    Steered,
    Turn,
)
from tracewire_engine.protocol.messages import FinishRecord, Report
from tracewire_engine.worker.blocks import save_marks, time_limit
from tracewire_engine.worker.large_arrays import encode

from .expected_value import ExpectedValue, same_values
from .session import Session
from .stand_ins import tree_of
from .told_steps import RepeatedStep, ToldSteps, ValueChanged

__all__ = ["Driver"]

#: How long the first of several steps takes before they are reported one by one, in seconds: what one has saved is
#: there if the next one's blocks take long. And how long ends of requests take before they are reported, so that others
#: can go on with them.
_SLOW_S, _ENDS_S = 0.02, 0.002

#: For how long, and for which part of the shared rows, the worker is not told how far this process is, if there is
#: nothing else to report: a report takes time of the thread that runs the model.
_UNTOLD_S, _UNTOLD_PART = 0.02, 8

#: How many bytes of reports may wait here for the worker while more are made.
_WAITING = 16 << 20

#: The largest report, in bytes. Large arrays are not in reports, unless the engine has no threshold for them.
_MOST_REPORTED = 240 << 20

_turns = msgspec.msgpack.Decoder(Turn)
_answers = msgspec.msgpack.Decoder(Answer)
_encode = msgspec.msgpack.Encoder().encode


class _Opaque:
    """Stands for an object of the worker's that cannot be shared."""

    def __init__(self, number: int, kind: str) -> None:
        self.number, self._kind = number, kind

    def __repr__(self) -> str:
        return f"<{self._kind} of the model, which a block in a process of its own cannot use>"


class _Link:
    """A session's end of the reports: `StepReporter` sends to it as to the link to the adapter.

    Args:
        channel: to the worker.
        saves: to the save relay.
        most_untold: for how many bytes of shared rows the worker need not be told that they were read.
    """

    def __init__(self, channel: HostChannel, saves: HostChannel, most_untold: int) -> None:
        self._channel, self._saves, self._most_untold = channel, saves, most_untold
        self._unsent, self._saved = Reported(), Saved([])
        #: The mark of which the worker knows; since when it has not been told how far this process is; and the times of
        #: the steps since then.
        self._known = 0
        self._untold_since: float | None = None
        self._used: list[int] = []
        #: How many bytes of large arrays were sent.
        self.large_sent = 0

    def put(self, tensor: torch.Tensor, report: Report) -> None:
        """A host has no ring buffer."""

    def send(self, *reports: Report) -> None:
        """Report steps and ends, with the next `flush`."""
        for report in reports:
            self._saved.steps += report.steps
            self._unsent.finishes += report.finishes

    def send_behind(self, report: Report) -> None:
        """Report what follows large arrays, with the next `flush`."""
        self._unsent.steps += report.steps
        self._unsent.finishes += report.finishes

    def flush(self, turns: int, mark: int, *, replied: bool = False, due: bool = False, used_us: int = 0) -> None:
        """Send what is to be reported, how far this process is, and for how long it has worked (see `Reported`).

        Args:
            turns: how many turns this process has taken.
            mark: of the last of them.
            replied: whether the worker was sent a reply, so that it knows how far this process is.
            due: whether the worker is to know that at once.
            used_us: for how long a step has kept this process busy, in microseconds; 0 if that says nothing of others.
        """
        if self._saved.steps:
            saved, self._saved = self._saved, Saved([])
            self._put(self._saves, _encode(saved))
        unsent = self._unsent
        unsent.turns, unsent.mark = turns, mark
        if replied:
            self._known, self._untold_since = mark, None
        else:
            self._untold_since = self._untold_since or time.monotonic()
        if used_us:
            self._used.append(used_us)
        full = mark - self._known > self._most_untold
        if unsent.steps or unsent.finishes or (not replied and (due or full or self.quiet_s == 0)):
            self.tell()

    @property
    def quiet_s(self) -> float | None:
        """For how many seconds the worker need not be told how far this process is; `None` if it knows that."""
        since = self._untold_since
        return None if since is None else max(0.0, since + _UNTOLD_S - time.monotonic())

    def tell(self) -> None:
        """Tell the worker how far this process is, and the ends of requests."""
        unsent, self._unsent = self._unsent, Reported()
        used, self._used = self._used, []
        unsent.used_us = sum(used) // len(used) if used else 0
        self._known, self._untold_since = unsent.mark, None
        if unsent.finishes:
            # The worker may end this process when it has read that.
            self._saves.settle()
        self._put(self._channel, _encode(unsent))

    @staticmethod
    def _put(channel: HostChannel, message: bytes) -> None:
        if len(message) > _MOST_REPORTED:
            raise ValueError(f"the saves of a turn take {len(message)} bytes; at most {_MOST_REPORTED} may")
        channel.settle(_WAITING)
        channel.send(message)

    def chunk(self, request: str, blob: str, number: int, data: memoryview) -> None:
        """Send a piece of a large array."""
        self.large_sent += len(data)
        self._channel.settle(_WAITING)
        self._channel.send(_encode(Chunk(request, blob, number, bytes(data))))


class _Blobs:
    """Takes the place of a worker's `BlobSender`: large arrays go to the worker before the record that has them."""

    def __init__(self, link: _Link) -> None:
        self._link = link

    def step(self, record: Any, deltas: list[Any], taken: list[Any]) -> None:
        self._ship(record.request, taken)
        record.deltas = msgspec.Raw(encode(deltas))
        self._link.send_behind(Report(steps=[record]))

    def finish(self, record: FinishRecord, ending: Any, checked: Any) -> None:
        if ending is not None:
            self._ship(record.request, ending.taken)
            for large in ending.again:
                for _ in large.chunks():
                    pass
            deltas, record.manifest, changed = ending.compare()
            self._ship(record.request, changed)
            record.deltas = msgspec.Raw(encode(deltas))
        self._link.send_behind(Report(finishes=[record]))

    def _ship(self, request: str, arrays: list[Any]) -> None:
        for large in arrays:
            for number, chunk in enumerate(large.chunks()):
                self._link.chunk(request, large.blob, number, chunk)
            large.release()


class _Inputs:
    """The large variables of blocks, which the worker has in files: `inputs / name` is the file's bytes."""

    def __init__(self, ask: Callable[[Request], Any]) -> None:
        self._ask = ask

    def __truediv__(self, name: str) -> Any:
        return self._ask(Request("", name))


class Driver:
    """One host: its connections to the worker, and its session.

    Args:
        settings: of the engine.
        calls: over which the worker's turns come.
        reports: over which the ends of requests and large arrays leave for the worker.
        saves: over which all other saves leave for the save relay.
        given: memory into which the worker writes.
        returned: memory into which this process writes.
    """

    def __init__(
        self,
        settings: HostSettings,
        calls: HostChannel,
        reports: HostChannel,
        saves: HostChannel,
        given: RowMemory,
        returned: RowMemory,
    ) -> None:
        self._settings = settings
        self._calls, self._given, self._returned = calls, given, returned
        self._link = _Link(reports, saves, given.size // _UNTOLD_PART)
        self._leaving = (reports, saves)
        self._names: list[str] = []
        self._told = ToldSteps()
        self._fetched: dict[tuple[str, str], Any] = {}
        tree = tree_of(settings.modules, self._fetch)
        self._session = Session(tree, settings, self._call, self._link, _Blobs(self._link), _Inputs(self._ask))

    @torch.inference_mode()
    def run(self) -> None:
        """Take turns until the worker closes the connection."""
        settings, turns, used, mark, usual = self._settings, 0, 0.0, 0, False
        limit = _limit(settings, waits=False)
        while True:
            try:
                turn = _turns.decode(self._next())
            except ChannelClosed:
                return
            began, ended, worked = time.monotonic(), 0, time.thread_time_ns()
            wanted = _limit(settings, waits=turn.waits or turn.limited)
            if wanted != limit:
                limit = wanted
                time_limit.limit_turns(limit, alone=True)
            time_limit.limit_together(limit - used if limit else None)
            self._names += turn.names
            self._session.budget.room = turn.large_allowed - self._link.large_sent
            reply, odd = Reply(), False
            with time_limit.timer_once():
                for event in self._told.events(turn.events):
                    self._expect_unchanged(reply)
                    if isinstance(event, (Began, RepeatedStep)):
                        time_limit.limit_together(limit or None)
                        usual = not event.new
                    # What is done when a request begins or ends says nothing of other steps.
                    odd = odd or not usual or isinstance(event, Finished)
                    self._take(event, reply)
                    ended += isinstance(event, (Ended, RepeatedStep))
                    if not turn.waits and _is_due(event, time.monotonic() - began, turn.turns - ended):
                        self._link.flush(turns + min(ended, turn.turns - 1), mark, due=True)
                        began = time.monotonic() if isinstance(event, Finished) else began
            turns, mark = turns + turn.turns, turn.mark
            used = limit - time_limit.left_together() if limit else 0.0
            used_us = (time.thread_time_ns() - worked) // (1000 * max(1, ended)) if not odd else 0
            if not turn.waits:
                self._expect_unchanged(reply)
            else:
                session = self._session
                reply.used_us = used_us
                reply.waits, reply.observed, reply.begins = session.waits(), session.observed(), session.begins()
                self._say(reply)
            self._link.flush(turns, turn.mark, replied=turn.waits, used_us=used_us if ended else 0)

    def _next(self) -> bytes | memoryview:
        """Wait for the worker's next turn."""
        if (quiet_s := self._link.quiet_s) is not None:
            try:
                return self._calls.receive(quiet_s, beside=self._leaving)
            except ChannelTimeout:
                self._link.tell()
        return self._calls.receive(beside=self._leaving)

    @staticmethod
    def _expect_unchanged(reply: Reply) -> None:
        if reply.edited or reply.replaced is not None:
            raise ValueChanged

    def _take(self, event: Any, reply: Reply) -> None:
        session = self._session
        if isinstance(event, RepeatedStep):
            self._repeat(event)
        elif isinstance(event, Reached):
            self._count(event.passed)
            self._reach(event, reply)
        elif isinstance(event, Ended):
            self._count(event.passed)
            session.end()
        elif isinstance(event, Began):
            session.begin(event)
        elif isinstance(event, Finished):
            session.finish(event)
        elif isinstance(event, Steered):
            session.steer(event.changes)
        elif isinstance(event, Generated):
            session.generated(event.message)
        elif isinstance(event, EditsFailed) and not all(map(session.is_over, event.requests)):
            raise ValueChanged

    def _repeat(self, step: RepeatedStep) -> None:
        session = self._session
        session.begin(step.began)

        def expect(reached: Reached, value: Any) -> ExpectedValue | None:
            return session.expected(reached.location, value, by_request=reached.by_request)

        for reached, value in step.values(self._given, _other, expect):
            self._count(reached.passed)
            if session.reach(reached.location, value, by_request=reached.by_request) is not value:
                raise ValueChanged
        self._count(step.passed)
        session.end()

    def _count(self, passed: bytes) -> None:
        if passed:
            self._session.count(array("H", passed), self._names)

    def _reach(self, event: Reached, reply: Reply) -> None:
        served: list[tuple[torch.Tensor, Shape]] = []

        def read(index: int, shape: Shape) -> torch.Tensor:
            tensor = self._given.read(shape)
            served.append((tensor, shape))
            return tensor

        value = unpack_value(event.value, read, _other)
        expected = self._session.expected(event.location, value, by_request=event.by_request)
        left = self._session.reach(event.location, value, by_request=event.by_request)
        self._returned.reset()
        reply.edited, reply.replaced = [], None
        for index, (tensor, shape) in enumerate(served):
            known = None if expected is None else expected.of(tensor)
            if not (self._given.equals(tensor, shape) if known is None else same_values(tensor, known)):
                reply.edited.append((index, self._share(tensor)))
        if left is not value:
            reply.replaced = pack_value(left, self._share, _number)

    def _share(self, tensor: torch.Tensor) -> Shape:
        start = self._returned.room(tensor.nbytes)
        if start is None:
            raise SharedValueError(f"a block's values take more than the {self._returned.size} bytes of shared memory")
        self._returned.write(tensor, start)
        return Shape(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start)

    def _say(self, said: Reply | Request) -> None:
        message = _encode(said)
        if len(message) > MOST_SAID:
            raise SharedValueError(f"a message of {len(message)} bytes to the model; at most {MOST_SAID} are taken")
        self._calls.send(message)

    # --- asked by a block ---------------------------------------------------------------------------------------------

    def _call(self, path: str, value: Any) -> Any:
        self._returned.reset()
        return self._ask(Request(path, value=pack_value(value, self._share, _number)))

    def _fetch(self, path: str, attribute: str) -> Any:
        key = path, attribute
        if key not in self._fetched:
            try:
                self._fetched[key] = self._ask(Request(f"model.{path}" if path else "model", attribute)), None
            except AttributeError as error:
                self._fetched[key] = None, str(error)
        value, missing = self._fetched[key]
        if missing is not None:
            raise AttributeError(missing)
        return value

    def _ask(self, request: Request) -> Any:
        with time_limit.shielded(waiting=True):
            self._say(request)
            answer = _answers.decode(self._calls.receive(beside=self._leaving))
            if answer.error is not None:
                kind, message = answer.error
                raise _ERRORS.get(kind, RuntimeError)(message)
            assert answer.value is not None
            return unpack_value(answer.value, lambda _, shape: self._given.read(shape), _other)


def _is_due(event: Any, seconds: float, left: int) -> bool:
    """Whether what there is to report is reported behind an event of a turn, and not with all of the turn.

    Args:
        event: the last one.
        seconds: since the turn began, or since the last such report.
        left: how many steps of the turn are not over.
    """
    if isinstance(event, Finished):
        return seconds > _ENDS_S
    return left > 0 and seconds > _SLOW_S and isinstance(event, (Ended, RepeatedStep))


def _limit(settings: HostSettings, *, waits: bool) -> float:
    """How long a block may take, in seconds; 0 for any time."""
    limits = [settings.block_timeout, settings.step_timeout if waits else 0.0]
    return min((one for one in limits if one), default=0.0)


_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (
        *(AttributeError, IndexError, KeyError, LookupError, NotImplementedError, TypeError, ValueError),
        SourceNotAvailable,
    )
}


def _other(given: Any) -> Any:
    if given is None:
        return NO_SKIP
    if type(given[0]) is str:
        return made(given)
    return _Opaque(int(given[0]), str(given[1]))


def _number(value: Any) -> Any:
    if value is NO_SKIP:
        return None
    if isinstance(value, _Opaque):
        return [value.number]
    if isinstance(value, Envoy):
        return [value.path]
    raise SharedValueError(f"{type(value).__name__} cannot be given to the model")


def start(settings: HostSettings) -> None:
    """Prepare this process to run blocks. Called once, before any block is compiled."""
    torch.set_num_threads(settings.threads)
    inc()
    save_marks.install()
    time_limit.keep_modules(("nnsight", "tracewire"), save_marks.remount)
    time_limit.limit_turns(settings.block_timeout, alone=True)
    os.environ.clear()


__all__ += ["start"]
