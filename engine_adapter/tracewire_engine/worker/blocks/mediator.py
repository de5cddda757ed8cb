"""nnsight's mediator of a block: the greenlet that runs the block's code, and what the code may ask for."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

from greenlet import GreenletExit, getcurrent
from nnsight.intervention.cache import CacheView
from nnsight.intervention.interleaver import Event, Mediator
from nnsight.intervention.iterator import Iterations
from nnsight.modeling.vllm.tracer import VLLMTracer

from tracewire_bus.wire.messages import Failure

from . import save_marks as marks
from . import time_limit as watchdog
from .batched_serving import RowBatcher
from .compiled_source import CompiledSource
from .encoder_guard import refuse_encoders
from .failures import attributes, failure_of, is_stop, release_frames
from .live_params import LIVE, LiveRun, LiveValues
from .plain_values import CopyingCache, plain
from .residual import ResidualReads

__all__ = ["RESULT", "SAMPLES", "BlockMediator", "BlockTracer"]

logger = logging.getLogger("vllm.tracewire")

#: nnsight's locations of `tracer.result`, and of `model.samples`.
RESULT, SAMPLES = "result", "model.samples"

#: How often a block may ask for one location within one step, and how many turns of a loop over steps may ask for
#: nothing within one: a fraction of a second of everybody's time.
MOST_REQUESTS = 1 << 14

MOST_IDLE = 1 << 16


class SameStep(RuntimeError):
    """A block asks for what it has been handed over and over, within one step."""


class NotInVocabulary(ValueError):
    """A block put something in place of a sampled token that is no token of the model's."""


class UntappedLocation(LookupError):
    """A block asks for a location that an engine with CUDA graphs does not serve: it has no tap there."""


class BlockMediator(Mediator):
    """nnsight's mediator, started from compiled source instead of a captured `with` block."""

    iteration: int | None
    pending: Any
    worker: Any

    #: Under tensor parallelism, the other ranks, and what this block is called among them.
    ranks: Any = None
    key: Any = None
    #: Whether the ranks have compared how it ended.
    compared = False

    def __init__(self, code: types.CodeType, glbls: dict[str, Any], lcls: dict[str, Any]) -> None:
        #: Its time in each step.
        self.budget = watchdog.Budget()
        #: How many requests it has made of the model; what it asked for last, and how often on end.
        self.asked = 0
        self._last: tuple[str, int | None] = ("", None)
        self._repeated = 0
        #: Whether it has gone through steps; and, by line, what it has asked for there again and again, and how often.
        self.iterated = False
        self.again: dict[int, tuple[str, int]] = {}
        #: Whether its frames are being let go of.
        self._ending = False
        super().__init__(code, glbls, lcls)
        # nnsight sets this when a mediator arrives by pickle, which this one does not.
        self.presaved: set[str] = set()
        #: The exception of the block, with its traceback, also if the exception was thrown into the block.
        self.raised: BaseException | None = None
        self.compiled: CompiledSource | None = None
        #: Of a standing intervention: whether its request ends with it if it raises.
        self.fatal = False
        self.live = LiveRun("")
        #: The block's saves by name, between a step's end and its report.
        self.found: dict[str, Any] | None = None
        #: Stand-ins for saved objects that cannot travel, by identity of the object.
        self.made: dict[int, tuple[Any, Any]] = {}
        self.streams = ResidualReads()
        #: Where the block asked for this step's samples, to change them perhaps: a frame, its instruction and line.
        self.asked_samples: tuple[types.FrameType, int, int] | None = None

    @property
    def exception(self) -> BaseException | None:
        """The error with which the block ended, if it did not finish."""
        return self._exception

    @exception.setter
    def exception(self, exception: BaseException | None) -> None:
        # nnsight's way, and each of ours, to say that a block has failed, or stopped, in this step.
        self._exception = exception
        if exception is not None and self.ranks is not None:
            stopped = partial(Failure, type="tracer.stop()", message="the block stopped there")
            self._announce(
                stopped if is_stop(exception) else partial(failure_of, exception, self.compiled), caches=True
            )

    def _announce(self, what: Any, *, caches: bool) -> None:
        """Tell the other ranks that the block asks for nothing more here; nor do its caches, or they go on."""
        self.ranks.fail(self.key, what)
        if caches and self.caches:
            self.ranks.fail(self.key.cache, what)

    @property
    def ended(self) -> str:
        """How it has ended: `"failed"`, `"stopped"`, `"ended"` (at its end), or not at all (`""`)."""
        if self._exception is not None:
            return "stopped" if is_stop(self._exception) else "failed"
        return "ended" if self.worker is not None and self.worker.dead else ""

    def halt(self, error: BaseException) -> None:
        """End the block with an error, at the line where it waits."""
        waits = self.worker is not None and not self.worker.dead and self.pending is not None
        self.pending, self.exception = None, error
        if waits:
            self.worker.parent = getcurrent()
            with watchdog.turn(self.budget):
                try:
                    self.worker.throw(error)
                except BaseException as thrown:
                    self.raised = self.raised or thrown
        self.pending, self.exception = None, error

    def saved(self) -> dict[str, Any]:
        """The values that the block has saved and still binds to a name, by name, as they travel."""
        return {name: plain(value, self.made) for name, value in marks.saved(self).items()}

    def serve_result(self, result: Any) -> bool:
        """Serve `tracer.result`, if the block waits for it, and let it run on."""
        pending = self.pending
        if not self.alive or pending is None or (pending.event, pending.provider) != (Event.VALUE, RESULT):
            return False
        self.batch_group = None
        try:
            self.pending = self.switch(result)
        except Exception as exception:
            self.exception = exception
            self.pending = None
        return True

    def dispose(self) -> None:
        """Let go of all that the block held. Its scope, frames and traceback refer to each other, and to tensors.

        Left to a garbage collection, which counts objects and not their bytes, they would keep the device's memory; and
        it would come in the middle of some other step.
        """
        self._ending = True
        errors = [self.raised, self.exception]
        self.raised = self.exception = self.pending = self.transform = self.found = self.asked_samples = None
        self.made.clear()
        self.caches: list[Any] = []
        # Finalizers of the block's objects count towards the block's time.
        worker, budget = partial(setattr, self, "worker", None), watchdog.Budget()
        for let_go in (worker, partial(release_frames, errors), self.lcls.shared.clear, self.lcls.clear):
            try:
                with watchdog.turn(budget, building=True):
                    let_go()
            except Exception as exception:  # out of its time, or out of anything of the block's
                logger.debug("an ended block did not let go of what it held: %s", type(exception).__name__)

    def switch(self, *args: Any) -> Any:
        outer = watchdog.begin(self.budget)
        try:
            pending = super().switch(*args)
        finally:
            watchdog.end(outer)
        if pending is None and self.ranks is not None and self.worker.dead:
            self._announce(partial(Failure, type="its end", message="the block came to its end there"), caches=False)
        return pending

    def handle(self, provider: str, value: Any) -> Any:
        try:
            return self._handle(provider, value)
        finally:
            if self.streams:
                self.streams.write_back()

    def _handle(self, provider: str, value: Any) -> Any:
        # A read that is due, as most are, by nnsight's steps; the rest is nnsight's.
        pending: Any = self.pending
        batcher = self.interleaver.batcher
        if pending is not None and type(batcher) is RowBatcher:
            event, where, iteration, _ = pending
            reached = self.interleaver.counts.get(provider, 0) - self.counts_at_start.get(provider, 0)
            if event is Event.VALUE and where == provider and iteration == reached:
                if self.iteration:
                    self.iteration = None
                pending = self.pending = self.switch(batcher.rows(value, self))
                if pending is None or pending.provider != provider:
                    return value
        return super().handle(provider, value)

    def wanted(self, location: str) -> int:
        # Asked of every request that the block makes, in the block's own frame. nnsight would let it wait for ever.
        refuse_encoders(self.interleaver.encoders, location)
        taps = self.interleaver.taps
        if taps and location not in taps and location.rpartition(".")[2] in ("input", "output", "skip"):
            served = ", ".join(sorted(tap.removeprefix("model.") for tap in taps)[:8])
            raise UntappedLocation(
                f"{location.removeprefix('model.')!r} is not a tap of this engine, which replays CUDA graphs "
                f"and serves only {served}"
            )
        if location == SAMPLES:
            self._note_line()
        occurrence = self.occurrence(location) if self.iteration is None else self.iteration
        self.asked += 1
        if (location, occurrence) != self._last:
            self._last, self._repeated = (location, occurrence), 0
        elif self._repeated == MOST_REQUESTS:
            raise SameStep(
                f"{location.removeprefix('model.')!r} was asked for {MOST_REQUESTS} times within one step, and is the "
                "same each time; `for step in tracer.iter[:]` goes from step to step"
            )
        elif not self.iterated:
            line = self._line()
            self.again[line] = location, self.again.get(line, (location, 1))[1] + 1
        self._repeated += 1
        return occurrence

    def _line(self) -> int:
        """The line that the block itself is at, outside its functions; 0 if it is at none."""
        frame: types.FrameType | None = sys._getframe(2)
        files = self.compiled.files if self.compiled is not None else {}
        line = 0
        while frame is not None:
            if frame.f_code.co_filename in files and frame.f_code.co_name == "<module>":
                line = frame.f_lineno
            frame = frame.f_back
        return line

    def warnings(self, tokens: int) -> list[str]:
        """A warning for the author of a block that has ended, whose request has so many tokens."""
        if tokens < 2 or self.iterated or self.compiled is None:
            return []
        found = []
        for line, (location, count) in self.again.items():
            loop = self.compiled.loop(line)
            if loop is not None:
                name = location.removeprefix("model.")
                found.append(
                    f"{loop}: this loop asked for {name!r} {count} times, all within the first of {tokens} steps; "
                    "`for step in tracer.iter[:]` goes from step to step"
                )
        return found

    def _note_line(self) -> None:
        """Remember the line of the block's that is about to ask for the samples."""
        frame: types.FrameType | None = sys._getframe(1)
        files = self.compiled.files if self.compiled is not None else {}
        while frame is not None and frame.f_code.co_filename not in files:
            frame = frame.f_back
        self.asked_samples = None if frame is None else (frame, frame.f_lasti, frame.f_lineno)

    def not_in_vocabulary(
        self, tokens: list[int], size: int, where: tuple[types.FrameType, int, int] | None
    ) -> NotInVocabulary:
        """The error of a block that left `tokens` as its request's samples, which it had asked for at `where`."""
        error = NotInVocabulary(
            f"model.samples holds token ids of this model, 0 to {size - 1}; the block left {tokens[0]} there"
        )
        if where is not None:
            attributes.__get__(error)["__intervention_tb__"] = types.TracebackType(None, *where)
        return error

    def _run(self) -> None:
        try:
            super()._run()
        except Exception as exception:
            self.raised = exception
            raise
        except BaseException as exception:
            if self._ending and isinstance(exception, GreenletExit):
                raise
            self.raised = watchdog.BlockExit(f"the block raised {type(exception).__name__}: {exception}")
            raise self.raised from exception


class Steps(Iterations):
    """nnsight's `tracer.iter`, whose turns do not run ahead of the model without end.

    A turn of an open loop that has asked the model for nothing is over with its step: the next one waits for the next
    step's beginning. It ends, as such loops do, with the request. A loop with an end runs on to it.
    """

    def __getitem__(self, key: Any) -> Steps:
        chosen = super().__getitem__(key)
        return Steps(chosen.start, chosen.stop, chosen.steps)

    def _indices(self) -> Iterator[int]:
        mediator: Any = getcurrent().mediator()
        mediator.iterated = True
        opened = self.steps is None and self.stop is None
        asked, idle = -1, 0
        for step in super()._indices():
            if mediator.asked != asked:
                idle = 0
            elif opened:
                if step >= mediator.occurrence(LIVE):
                    mediator.iteration = step
                    Mediator.value(LIVE)
            elif idle == MOST_IDLE:
                raise SameStep(
                    f"{MOST_IDLE} turns of this loop have asked the model for nothing, within one step; a loop over "
                    "some steps is `tracer.iter[0:1]`, and one that is done ends with `break`"
                )
            else:
                idle += 1
            asked = mediator.asked
            yield step


class BlockTracer(VLLMTracer):
    """The `tracer` of a block, without a `with` block of its own: `iter`, `all()`, `stop()`, `cache()`, `result`, and
    ours, `live`.
    """

    def __init__(self, envoy: Any, live: LiveValues) -> None:
        super().__init__(envoy, "__call__")
        #: The trace's live parameters, as the block's third name has them.
        self.live = live

    @property
    def iter(self) -> Steps:
        """nnsight's."""
        return Steps()

    def cache(self, *args: Any, **kwargs: Any) -> CacheView:
        """nnsight's, of copies."""
        view = super().cache(*args, **kwargs)
        view._cache.__class__ = CopyingCache
        return view

    def __repr__(self) -> str:
        return "<tracer>"
