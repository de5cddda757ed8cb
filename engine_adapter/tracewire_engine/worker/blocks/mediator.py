"""nnsight's mediator of a block: the greenlet that runs the block's code, and the requests that the code may make."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
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
from .process_state import recursion_limit
from .residual import ResidualReads

__all__ = ["RESULT", "SAMPLES", "BlockMediator", "BlockTracer", "in_vocabulary"]

logger = logging.getLogger("vllm.tracewire")

#: nnsight's locations of `tracer.result`, and of `model.samples`.
RESULT, SAMPLES = "result", "model.samples"

#: How often in a row a block may ask for one location within one step. All requests wait meanwhile, for a fraction
#: of a second.
MOST_REQUESTS = 1 << 14

#: How many turns in a row of a loop over steps may ask the model for nothing.
MOST_IDLE = 1 << 16


class SameStep(RuntimeError):
    """A block asks for the same location over and over within one step, or its loop over steps asks for nothing."""


class NotInVocabulary(ValueError):
    """A block replaced a sampled token by a number that is no token id of the model."""


class UntappedLocation(LookupError):
    """A block asks for a location at which an engine that replays CUDA graphs has no tap, and so cannot serve it."""


class BlockMediator(Mediator):
    """nnsight's mediator, started from compiled source instead of a captured `with` block."""

    iteration: int | None
    pending: Any
    worker: Any
    #: The rows that it is served: the index of the first one, and how many.
    batch_group: Any

    #: Under tensor parallelism: the connection to the other ranks, and the key under which all ranks know this block.
    ranks: Any = None
    key: Any = None
    #: Whether the ranks have compared how this block ended.
    compared = False

    def __init__(self, code: types.CodeType, glbls: dict[str, Any], lcls: dict[str, Any]) -> None:
        #: How much time this block may still take in the step.
        self.budget = watchdog.Budget()
        #: How many locations it has asked for; the location and step that it asked for last; and how often in a row it
        #: asked for that.
        self.asked = 0
        self._last: tuple[str, int | None] = ("", None)
        self._repeated = 0
        #: Whether it has used `tracer.iter`. And, by line of the block: the location that the line has asked for
        #: repeatedly within a step, and how often.
        self.iterated = False
        self.again: dict[int, tuple[str, int]] = {}
        #: Whether `dispose` is freeing its frames.
        self._ending = False
        super().__init__(code, glbls, lcls)
        # nnsight sets this when it unpickles a mediator, and this one is not pickled.
        self.presaved: set[str] = set()
        #: The exception with which the block's code ended, also if the exception was thrown into the block.
        self.raised: BaseException | None = None
        self.compiled: CompiledSource | None = None
        #: Whether its request ended while it waited for a location that the model had passed before.
        self.waited_in_vain = False
        #: Of a standing intervention: whether an exception of it also ends the request.
        self.fatal = False
        self.live = LiveRun("")
        #: The block's saves by name, between a step's end and its report.
        self.found: dict[str, Any] | None = None
        #: Saved objects that cannot travel and the plain values sent in their place, by `id` of the object.
        self.made: dict[int, tuple[Any, Any]] = {}
        self.streams = ResidualReads()
        #: Where the block last asked for the sampled tokens: a frame, its instruction and its line. An error of a token
        #: that the block put there names this line.
        self.asked_samples: tuple[types.FrameType, int, int] | None = None

    @property
    def exception(self) -> BaseException | None:
        """The error with which the block ended, if it did not finish."""
        return self._exception

    @exception.setter
    def exception(self, exception: BaseException | None) -> None:
        # nnsight and this package both set this when a block fails, or stops, in this step.
        self._exception = exception
        if exception is not None and self.ranks is not None:
            stopped = partial(Failure, type="tracer.stop()", message="the block stopped there")
            self._announce(
                stopped if is_stop(exception) else partial(failure_of, exception, self.compiled), caches=True
            )

    def _announce(self, what: Any, *, caches: bool) -> None:
        """Tell the other ranks that the block asks for nothing more here; with `caches`, nor do its caches."""
        self.ranks.fail(self.key, what)
        if caches and self.caches:
            self.ranks.fail(self.key.cache, what)

    @property
    def ended(self) -> str:
        """How the block has ended: `"failed"`, `"stopped"` (by `tracer.stop()`) or `"ended"`; `""` while it runs."""
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
        """The values that the block has saved and still binds to a name, by name, as plain values that can travel."""
        return {name: plain(value, self.made) for name, value in marks.saved(self).items()}

    def serve_result(self, result: Any) -> bool:
        """Serve `tracer.result` if the block waits for it, and let the block run on.

        Returns:
            Whether the block was waiting for the result.
        """
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
        """Free all that the block held. Its scope, frames and traceback refer to each other and to tensors.

        The garbage collector counts objects and not their bytes. Left to it, these tensors would keep the device's
        memory for long, and the collection would then interrupt some other step.
        """
        self._ending = True
        errors = [self.raised, self.exception]
        self.raised = self.exception = self.pending = self.transform = self.found = self.asked_samples = None
        self.made.clear()
        self.caches: list[Any] = []
        # Finalizers of the block's objects are the block's code, so their time is limited too.
        worker, budget = partial(setattr, self, "worker", None), watchdog.Budget()
        for let_go in (worker, partial(release_frames, errors), self.lcls.shared.clear, self.lcls.clear):
            try:
                with watchdog.turn(budget, building=True):
                    let_go()
            except Exception as exception:  # the time limit's, or one that the block's objects raise
                logger.debug("freeing the objects of an ended block failed: %s", type(exception).__name__)

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
        # Most calls serve a read that is due now. This does what nnsight does for it; nnsight handles the others.
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
        # nnsight calls this for every location that the block asks for, in the block's own greenlet, so an error here
        # is raised at the block's line. Without these checks the block would wait for ever.
        if sys.getrecursionlimit() != recursion_limit():
            # The model's thread may be deeper by now than the block's limit allows.
            sys.setrecursionlimit(recursion_limit())
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
        # Each turn is short, and the time between them counts too.
        elif watchdog.left_together() < 0:
            raise watchdog.timeout()
        elif self._repeated == MOST_REQUESTS:
            raise SameStep(
                f"the block asked for {location.removeprefix('model.')!r} {MOST_REQUESTS} times within one step, in "
                "which it is the same each time; `for step in tracer.iter[:]` goes from step to step"
            )
        elif not self.iterated:
            line = self._line()
            self.again[line] = location, self.again.get(line, (location, 1))[1] + 1
        self._repeated += 1
        return occurrence

    def _line(self) -> int:
        """The line of the block's top level that is being executed; 0 if there is none."""
        frame: types.FrameType | None = sys._getframe(2)
        files = self.compiled.files if self.compiled is not None else {}
        line = 0
        while frame is not None:
            if frame.f_code.co_filename in files and frame.f_code.co_name == "<module>":
                line = frame.f_lineno
            frame = frame.f_back
        return line

    def warnings(self, tokens: int) -> list[str]:
        """Warnings for the author of a block that has ended.

        A block that loops over `range()` where it should loop over `tracer.iter` reads the same step again and again.

        Args:
            tokens: how many tokens the request has generated.
        """
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
        """Remember the line of the block that asks for the sampled tokens."""
        frame: types.FrameType | None = sys._getframe(1)
        files = self.compiled.files if self.compiled is not None else {}
        while frame is not None and frame.f_code.co_filename not in files:
            frame = frame.f_back
        self.asked_samples = None if frame is None else (frame, frame.f_lasti, frame.f_lineno)

    def not_in_vocabulary(
        self, tokens: list[int], size: int, where: tuple[types.FrameType, int, int] | None
    ) -> NotInVocabulary:
        """Make the error of a block that replaced its request's sampled tokens by invalid ones.

        Args:
            tokens: the invalid numbers that the block left there.
            size: of the model's vocabulary.
            where: the value of `asked_samples` when the block asked for the samples.
        """
        error = NotInVocabulary(
            f"model.samples takes token ids of this model, 0 to {size - 1}; the block left {tokens[0]} there"
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
        finally:
            # Here, since the model's thread may be deeper than a lower limit allows.
            sys.setrecursionlimit(recursion_limit())


class Steps(Iterations):
    """nnsight's `tracer.iter`, but its loops cannot run ahead of the model without end.

    If a turn of an open loop (`tracer.iter[:]`) asks the model for nothing, the next turn waits until the next step
    begins. So the loop ends with its request, as nnsight's open loops do. A loop with an end does not wait; it raises
    `SameStep` after `MOST_IDLE` turns in a row that ask for nothing.
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
                    f"{MOST_IDLE} turns of this loop have asked the model for nothing within one step; to loop over a "
                    "few steps write for example `tracer.iter[0:1]`, and leave a loop that is done with `break`"
                )
            else:
                idle += 1
            asked = mediator.asked
            yield step


class BlockTracer(VLLMTracer):
    """The `tracer` of a block: nnsight's `iter`, `all()`, `stop()`, `cache()` and `result`, and Tracewire's `live`."""

    def __init__(self, envoy: Any, live: LiveValues) -> None:
        super().__init__(envoy, "__call__")
        #: The trace's live parameters, which the block's third parameter is bound to as well.
        self.live = live

    @property
    def iter(self) -> Steps:
        """The steps of the generation: `for step in tracer.iter[:]`, as in nnsight."""
        return Steps()

    def cache(self, *args: Any, **kwargs: Any) -> CacheView:
        """nnsight's `tracer.cache`, but the cache keeps copies. Takes the same arguments."""
        view = super().cache(*args, **kwargs)
        view._cache.__class__ = CopyingCache
        return view

    def __repr__(self) -> str:
        return "<tracer>"


def in_vocabulary(
    served: torch.Tensor, drawn: torch.Tensor, asked: list[tuple[BlockMediator, Any]], size: int
) -> torch.Tensor:
    """Check the tokens that blocks left in place of the sampled ones.

    A token id outside the vocabulary would crash the worker in the next step's embedding. So it is replaced by the
    sampled token, and the block that left it is ended with an error.

    Args:
        served: the token ids `[requests, 1]` after the blocks.
        drawn: the token ids `[requests, 1]` that the model sampled.
        asked: the mediators that asked for the samples, each with its `asked_samples`.
        size: the size of the vocabulary.
    """
    valid = ((served >= 0) & (served < size)).all(-1)
    if bool(valid.all()):
        return served
    for row in (~valid).nonzero().flatten().tolist():
        left = [token for token in served[row].tolist() if not 0 <= token < size]
        for mediator, where in asked:
            rows: Any = mediator.batch_group
            if rows[0] == row and mediator.exception is None:
                mediator.halt(mediator.not_in_vocabulary(left, size, where))
    return torch.where(valid.unsqueeze(-1), served, drawn)
