"""From a block's source text to a running nnsight worker, inside the process that holds the model.

The source is compiled once for all requests that send the same text, and never unpickled. What a request brings of its
own (variables, live parameters) is bound anew for each, so that one request's block cannot change another's.

The block runs as nnsight runs a `with` body: its statements are executed at the top level of a scope of their own, so
that the names they bind can be saved by name. `BlockMediator` adds what a shared engine needs: whatever the block
raises, `SystemExit` included, ends that block and nothing else.
"""

from __future__ import annotations
import __future__

import ast
import importlib
import linecache
import logging
import sys
import traceback
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from greenlet import GreenletExit, getcurrent
from nnsight.intervention.cache import CacheView
from nnsight.intervention.interleaver import EarlyStopException, Event, Mediator
from nnsight.intervention.iterator import Iterations
from nnsight.modeling.vllm.tracer import VLLMTracer

from tracewire_bus.wire.codec import digest_bytes
from tracewire_bus.wire.messages import Block, Failure
from tracewire_bus.wire.values import unpack
from tracewire_engine.worker.remote_inputs import HeldInputs
from tracewire_engine.worker.tensors import to_tensors

from . import save_marks as marks
from . import time_limit as watchdog
from .batched_serving import RowBatcher
from .encoder_guard import refuse_encoders
from .live_params import LIVE, LiveRun, LiveValues
from .plain_values import CopyingCache, plain
from .residual import Streams

__all__ = ["RESULT", "SAMPLES", "BlockCache", "BlockMediator", "BlockTracer", "failure_of", "is_stop"]

logger = logging.getLogger("vllm.tracewire")

_blocks = msgspec.msgpack.Decoder(Block)
_encoder = msgspec.msgpack.Encoder()
_NOTHING: Mapping[str, Any] = types.MappingProxyType({})

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
        # What nnsight sets when a mediator arrives by pickle, which ours does not.
        self.presaved: set[str] = set()
        #: What the block raised, with its traceback, however it was thrown in.
        self.raised: BaseException | None = None
        self.compiled: _Compiled | None = None
        #: Of a standing intervention: whether its request ends with it if it raises.
        self.fatal = False
        self.live = LiveRun("")
        #: What it has saved, by name, between a step's end and its report.
        self.found: dict[str, Any] | None = None
        #: What stands for saved objects that cannot travel themselves, by identity.
        self.made: dict[int, tuple[Any, Any]] = {}
        self.streams = Streams()
        #: Where the block asked for this step's samples, to change them perhaps: a frame, its instruction and line.
        self.asked_samples: tuple[types.FrameType, int, int] | None = None

    @property
    def exception(self) -> BaseException | None:
        """What the block ended with, if it did not come to its end."""
        return self._exception

    @exception.setter
    def exception(self, exception: BaseException | None) -> None:
        # nnsight's way, and each of ours, to say that a block has failed, or stopped, in this step.
        self._exception = exception
        if exception is not None and self.ranks is not None:
            stopped = partial(Failure, type="tracer.stop()", message="the block stopped there")
            self._tell(stopped if is_stop(exception) else partial(failure_of, exception, self.compiled), caches=True)

    def _tell(self, what: Any, *, caches: bool) -> None:
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
        """What it has saved and still binds to a name, by name, as it travels."""
        return {name: plain(value, self.made) for name, value in marks.saved(self).items()}

    def give(self, result: Any) -> bool:
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
        # What the block made may have a word to say when it goes, which takes part in its time.
        worker, budget = partial(setattr, self, "worker", None), watchdog.Budget()
        for let_go in (worker, partial(_unwind, errors), self.lcls.shared.clear, self.lcls.clear):
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
            self._tell(partial(Failure, type="its end", message="the block came to its end there"), caches=False)
        return pending

    def handle(self, provider: str, value: Any) -> Any:
        try:
            return self._handle(provider, value)
        finally:
            if self.streams:
                self.streams.settle()

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
        """What its author hardly meant, of a block that has ended and whose request has so many tokens."""
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
        """What the block fails with that left `tokens` as its request's samples, which it had asked for at `where`."""
        error = NotInVocabulary(
            f"model.samples holds token ids of this model, 0 to {size - 1}; the block left {tokens[0]} there"
        )
        if where is not None:
            _attributes.__get__(error)["__intervention_tb__"] = types.TracebackType(None, *where)
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


#: Annotations in a block are not evaluated, so that the names in them need not travel.
_FLAGS = __future__.annotations.compiler_flag


class _Compiled:
    """One source text, compiled: the block's code, its helpers' code, and the file names that tracebacks carry."""

    def __init__(self, block: Block, key: str) -> None:
        self.files: dict[str, tuple[str, str]] = {}
        self.source, self.first_line = block.source, block.first_line
        self._loops: list[ast.For] | None = None
        self.code = self._compile(block.source, block.filename, block.first_line, block.name, key)
        self.helpers = [
            self._compile(helper.source, helper.filename, helper.first_line, helper.name, f"{key}.{helper.name}")
            for helper in block.helpers
        ]

    def _compile(self, source: str, filename: str, first_line: int, name: str, key: str) -> types.CodeType:
        padded = "\n" * (first_line - 1) + source
        label = f"<{name} {key}>"
        code: types.CodeType = compile(padded, label, "exec", flags=_FLAGS, dont_inherit=True)
        # Without a modification time, so that linecache keeps it; nnsight reads it for nested `with` blocks.
        linecache.cache[label] = (len(padded), None, padded.splitlines(keepends=True), label)
        self.files[label] = (filename, name)
        return code

    def loop(self, line: int) -> str | None:
        """Where a `for` over `range()` begins that has a line of the block in its body and whose numbers are no index
        there: it stands for steps, perhaps. The innermost one; `None` if there is none.
        """
        if self._loops is None:
            tree = compile("\n" * (self.first_line - 1) + self.source, "<block>", "exec", ast.PyCF_ONLY_AST)
            self._loops = [node for node in ast.walk(tree) if isinstance(node, ast.For) and _counts_steps(node)]
        around = [loop for loop in self._loops if loop.body[0].lineno <= line <= (loop.end_lineno or 0)]
        if not around:
            return None
        filename = next(iter(self.files.values()))[0]
        return f"{filename}:{max(loop.lineno for loop in around)}"

    def forget(self) -> None:
        for label in self.files:
            linecache.cache.pop(label, None)


def _counts_steps(loop: ast.For) -> bool:
    """Whether a loop is over `range()`, and none of its numbers picks a part of anything."""
    called = loop.iter.func if isinstance(loop.iter, ast.Call) else None
    if not isinstance(called, ast.Name) or called.id != "range":
        return False
    names = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    return not any(
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Load)
        and any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node.slice))
        for statement in loop.body
        for node in ast.walk(statement)
    )


class BlockCache:
    """Compiled blocks by the digest of their text, the least recently used dropped beyond `size`."""

    def __init__(
        self,
        model: Any,
        device: torch.device,
        folder: Path | HeldInputs = Path(),
        size: int = 256,
        kind: type[BlockMediator] = BlockMediator,
    ) -> None:
        self._model = model
        self._kind = kind
        self.device = device
        self.folder = folder
        self._size = size
        self._compiled: OrderedDict[bytes, _Compiled] = OrderedDict()

    def mediator(self, block: bytes, live: LiveRun, shared: Mapping[str, Any] = _NOTHING) -> BlockMediator:
        """A worker for one request from an encoded `Block`, the live parameters of its run and what its trace shares.

        Raises whatever compiling, importing a module or decoding a value raises; the caller makes it the request's
        error.
        """
        message = _blocks.decode(block)
        # By its text alone: the values that come with it are the request's own, and may be large.
        key = digest_bytes(_encoder.encode((message.name, message.source, message.filename, message.first_line)))
        key += digest_bytes(_encoder.encode(message.helpers))
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = _Compiled(message, key.hex()[:12])
            while len(self._compiled) > self._size:
                self._compiled.popitem(last=False)[1].forget()
        else:
            self._compiled.move_to_end(key)

        with watchdog.turn(building=True):
            return self._bind(message, compiled, live, shared)

    def _bind(self, message: Block, compiled: _Compiled, live: LiveRun, shared: Mapping[str, Any]) -> BlockMediator:
        """A mediator over the compiled code, with this request's own values."""
        scope: dict[str, Any] = {"__builtins__": __builtins__, "__name__": f"tracewire.block.{message.name}"}
        for name, module in message.modules.items():
            scope[name] = importlib.import_module(module)
        for name, (module, attribute) in message.imports.items():
            scope[name] = _attribute(importlib.import_module(module), attribute)
        for name, path in message.paths.items():
            scope[name] = self._model.get(path) if path else self._model
        model, tracer, live_name = message.parameters
        values = LiveValues(live, self.device)
        scope[model] = self._model
        scope[tracer] = BlockTracer(self._model, values)
        scope[live_name] = values

        variables: dict[str, Any] = to_tensors(unpack(message.variables), self.device, self.folder)
        variables.update({name: shared[own] for name, own in message.shared.items()})
        if compiled.helpers:
            # Helpers see the block's variables as their globals; defined together, they see each other.
            shared = {**scope, **variables}
            for code in compiled.helpers:
                exec(code, shared)
            for helper in message.helpers:
                scope[helper.name] = shared[helper.name]
        mediator = self._kind(compiled.code, scope, variables)
        mediator.compiled, mediator.live = compiled, live
        return mediator


#: An exception's own, whatever its class says of them.
_attributes: Any = BaseException.__dict__["__dict__"]
_trace: Any = BaseException.__dict__["__traceback__"]
_cause: Any = BaseException.__dict__["__cause__"]
_context: Any = BaseException.__dict__["__context__"]
_members: Any = BaseExceptionGroup.__dict__["exceptions"]


def _unwind(errors: Iterable[BaseException | None]) -> None:
    """Let go of the frames that exceptions, and what they came of, have passed."""
    waiting, seen = list(errors), set[int]()
    while waiting:
        error = waiting.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        for trace in (_trace.__get__(error), dict.pop(_attributes.__get__(error), "__intervention_tb__", None)):
            # Anybody can call anything so.
            if type(trace) is types.TracebackType:
                traceback.clear_frames(trace)
        waiting += (_cause.__get__(error), _context.__get__(error))
        if issubclass(type(error), BaseExceptionGroup):
            waiting += _members.__get__(error)
        for attribute in (_trace, _cause, _context):
            attribute.__set__(error, None)


def _attribute(module: types.ModuleType, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


def failure_of(exception: BaseException, compiled: _Compiled | None, *, hint: str = "") -> Failure:
    """What went wrong, at the user's own line: the deepest frame of the traceback that is theirs."""
    kind = marks.class_name(type(exception))
    try:
        with watchdog.turn(building=True):
            message = _printable(str(exception), 10_000)
    except Exception as error:
        message = f"(its message could not be read: {type(error).__name__})"
    message += hint
    if issubclass(type(exception), SyntaxError) and compiled is None:
        return Failure(type=kind, message=message, field="block", line=getattr(exception, "lineno", None))
    try:
        with watchdog.turn(building=True):
            frames = list(_frames(exception))
    except Exception:  # its traceback is of its own making
        frames = []
    filename: str | None = None
    line: int | None = None
    source: str | None = None
    lines: list[str] = []
    files = compiled.files if compiled is not None else {}
    for frame in frames:
        if frame.filename in files:
            filename, function = files[frame.filename]
            line, source = frame.lineno, frame.line
            name = function if frame.name == "<module>" else frame.name
            lines.append(f'  File "{filename}", line {line}, in {name}\n    {source}\n')
    return Failure(
        type=kind,
        message=message,
        field="block",
        filename=filename,
        line=line,
        source=source,
        traceback="".join(lines) or None,
    )


def _frames(exception: BaseException) -> Iterable[traceback.FrameSummary]:
    """The frames that an exception has passed, or what it came of."""
    cause = exception.__cause__ if isinstance(exception, watchdog.BlockExit) and exception.__cause__ else exception
    trace = dict.get(_attributes.__get__(cause), "__intervention_tb__")
    return traceback.extract_tb(trace if type(trace) is types.TracebackType else _trace.__get__(cause))


def _printable(text: str, most: int) -> str:
    """The beginning of a text, as one that can be encoded."""
    return str.__getitem__(text, slice(most)).encode("utf-8", "backslashreplace").decode()


def is_stop(exception: BaseException | None) -> bool:
    """Whether a block ended by `tracer.stop()`."""
    return isinstance(exception, EarlyStopException)
