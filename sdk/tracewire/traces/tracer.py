"""Traces whose block is written inline, as the body of a `with`, which is captured and never runs here.

    with model.trace("The Eiffel Tower is in", max_tokens=5) as tracer:
        logits = model.logits.save()
    async for output in tracer:
        ...
    tracer.saves["logits"]

Entering the `with` finds its body in the source, and has Python leave it as soon as its first line is reached, by a
trace function: the one way there is to skip a body. Nothing of it needs nnsight, torch or the model on this side. The
body travels as any block does, as source with what it uses. Its names are looked up as the `with` is left, in the frame
around it. What it binds stays on the engine: `tracer.saves` has what it saved.

Without a prompt, the body is a *trace scope*: it runs here, to find the `with tracer.invoke(prompt):` in it, whose
bodies are the blocks. What it binds and saves itself (`rows = [].save()`) is shared: one object on the engine for all
invokes, which each of them can read and change by that name.
"""

from __future__ import annotations

import ast
import builtins
import copy
import sys
import warnings
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio

from tracewire.capture.intervention import ENGINE_NAMES, Capture
from tracewire.capture.source import FunctionSource, WithSource, find_with
from tracewire.checks import type_name
from tracewire.errors import (
    BlockError,
    BlockOnly,
    BusUnavailable,
    ClientClosed,
    TraceRejected,
    TracewireError,
    UntransportableVariable,
)
from tracewire_bus.transport.connection import Background
from tracewire_bus.wire.messages import Block, Submission

from .model import Model
from .state import Saves
from .trace import _LEAVE_S, Trace, logger

if TYPE_CHECKING:
    from tracewire.client import Client, PromptInput

    from .state import Result

__all__ = ["Invoker", "Tracer"]


#: What a tracer has in a block only.
_IN_BLOCKS = frozenset({"iter", "all", "stop", "cache", "live", "next"})


class _Skipped(BaseException):
    """Leaves a `with` body before its first line. Carries nothing to anybody but the `with` that it is raised in."""


class _Skip:
    """Keeps one `with` body from running, from when it is armed until it is disarmed."""

    def __init__(self, source: WithSource, frame: FrameType) -> None:
        self._begins = source.begins
        self._frame = frame
        self._displaced = sys.gettrace(), frame.f_trace
        # Python asks a frame's own trace function only while the thread has one.
        sys.settrace(_nothing)
        frame.f_trace = self._line

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event != "line" or frame.f_lineno < self._begins:
            return self._line
        raise _Skipped

    def disarm(self) -> None:
        """Give whoever traced before (a debugger, coverage) its place back."""
        whole, self._frame.f_trace = self._displaced
        sys.settrace(whole)


def _nothing(frame: FrameType, event: str, argument: Any) -> None:
    """Traces nothing."""


class _Body:
    """The body of a `with`, from entering to leaving it."""

    def __init__(self, frame: FrameType, name: str) -> None:
        self.frame = frame
        self.source = find_with(frame, name)
        if not self.source.is_empty:
            _ = self.source.checked
        self._skip = None if self.source.is_empty else _Skip(self.source, frame)

    def disarm(self) -> None:
        """Do not skip it."""
        if self._skip is not None:
            self._skip.disarm()

    def left(self, kind: type[BaseException] | None) -> bool:
        """Whether the body was skipped, and is to be sent; otherwise what was raised goes on.

        Raises:
            BlockError: it ran.
        """
        if self._skip is None:
            return kind is None
        self._skip.disarm()
        if kind is None:
            raise self.source.error("the block ran here instead of being captured: something else traces this thread")
        return kind is _Skipped

    @property
    def scope(self) -> Mapping[str, Any]:
        """What names mean around it."""
        return ChainMap(self.frame.f_locals, self.frame.f_globals)


class Tracer(Trace):
    """A trace that is written as a `with` statement, and its outputs as they come.

    Made by `Model.trace`. Leaving the `with` queues the submission, whether or not anybody
    reads what comes. It happens in the background, in the order in which the statements were left; what was refused is
    raised by `accepted()`, `result()` and the first item, and the client waits for it when it is closed. From then on
    it is a `Trace`. The `with` does not wait for its end, nor does anything cancel it but
    `cancel()`, `aclose()` and its client's end (unless it was submitted with `detach=True`).

    Inside a block, `tracer` is nnsight's: `iter`, `all()`, `stop()`, `cache()`, `result`; and `live`, the trace's live
    parameters. Outside, asking for them raises a `BlockOnly`.
    """

    if TYPE_CHECKING:
        iter: Any
        live: Any

        def all(self) -> Any: ...
        def cache(self, **options: Any) -> Any: ...
        def stop(self) -> None: ...

    def __init__(
        self,
        client: Client,
        model: Model,
        prompt: PromptInput | None,
        prompts: Sequence[PromptInput] | None,
        options: dict[str, Any],
    ) -> None:
        from tracewire.client import made_id

        #: Whether the caller knows its id, whatever becomes of the handle.
        self._followed = options.get("trace_id") is not None
        options["trace_id"] = made_id(options.get("trace_id"))
        super().__init__(client, Submission(trace=options["trace_id"], model=model.name, invokes=[]))
        self._traced = model
        self._prompt, self._prompts, self._options = prompt, prompts, options
        self._body: _Body | None = None
        self._scope: _TraceScope | None = None
        self._queued: anyio.Event | None = None
        self._refused: Exception | None = None
        #: Around its submission, while that is under way.
        self._starting: anyio.CancelScope | None = None
        #: Closed before it was submitted.
        self._withdrawn = False

    def __getattr__(self, name: str) -> Any:
        if name == "barrier":
            raise BlockOnly(
                "tracer.barrier is not served, nor is it by nnsight's own engine: each invoke is a request of its own, "
                "and the engine decides when it runs (invokes share lists, dicts and arrays that the scope saves)"
            )
        if name in _IN_BLOCKS:
            raise BlockOnly(
                f"tracer.{name} belongs into a block: below `with model.trace(prompt) as tracer:`, or below "
                "`with tracer.invoke(prompt):`"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- the with -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._body is not None or self._queued is not None:
            raise TracewireError(f"trace {self.id} was entered before: make another one for each with")
        body = _Body(sys._getframe(1), "model.trace(...)")
        context = body.source.node.items[-1]
        if context.optional_vars is None and isinstance(context.context_expr, ast.Call) and not self._followed:
            body.disarm()
            raise body.source.error(
                "nothing could read what this trace saves: write `with model.trace(...) as tracer:`, and iterate over "
                "tracer or await tracer.result() below it (or pass a trace_id, by which it can be followed)"
            )
        self._body = body
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        body, self._body = self._body, None
        assert body is not None
        if not body.left(kind):
            return False
        try:
            self._submission = self._captured(body)
        except BaseException as problem:
            # Not the caller's business.
            if problem.__context__ is error:
                problem.__context__ = None
            raise
        finally:
            self._scope = None
        self._client._queue(self)
        return True

    def _captured(self, body: _Body) -> Submission:
        """The submission that a body says."""
        prompts: Sequence[PromptInput] | None = self._prompts
        options, block = dict(self._options), None
        shared = dict(options.pop("shared", None) or {})
        if self._prompt is None and prompts is None:
            self._scope = _TraceScope(self, body, shared)
            prompts = self._scope.run()
            shared = self._scope.shared
        elif not body.source.is_empty:
            block = capture(body.source, body.scope, self, {}, shared)
        return self._client.trace(
            self._traced, self._prompt, block, prompts=prompts, shared=shared, **options
        )._submission

    def invoke(self, prompt: PromptInput | None = None, /, **sampling: Any) -> Invoker:
        """A prompt with a block of its own, in the body of a `with model.trace(...)` that has none.

            with model.trace(max_tokens=8) as tracer:
                rows = [].save()
                for text in ("one", "two"):
                    with tracer.invoke(text, temperature=0.0):
                        rows.append(model.logits[-1].argmax().item())

        `sampling` are sampling params, over those of the trace.
        """
        if self._scope is None:
            given = "" if self._prompt is None and self._prompts is None else ": it was given a prompt"
            raise TracewireError(f"tracer.invoke() belongs into the body of `with model.trace(...)`{given}")
        return Invoker(self, self._scope, prompt, sampling)

    # --- submission ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Wait until the submission is durable, which leaving the `with` has begun; or try again after a refusal.

        Raises what `Trace.start` does.
        """
        refused, self._refused = self._refused, None
        if refused is not None:
            await super().start()
        else:
            await self._submitted()

    async def _submitted(self) -> None:
        if self._queued is None:
            raise TracewireError(f"trace {self.id} has no block yet: write it below `with model.trace(...) as tracer:`")
        await self._queued.wait()
        if self._refused is not None:
            raise self._refused

    async def _submit(self, away: BusUnavailable | None) -> None:
        """Submit it, unless it waited for longer than its client is patient, with Redis `away`."""
        assert self._queued is not None
        try:
            if away is not None:
                raise BusUnavailable(str(away))
            with anyio.CancelScope() as self._starting:
                if not self._withdrawn:
                    await super().start()
            if self._withdrawn:
                raise TracewireError(f"trace {self.id} was closed before it was submitted")
        except Exception as error:
            if not self._withdrawn:
                logger.warning("trace %s was not submitted: %s", self.id, error)
            self._refused = error
        finally:
            self._queued.set()

    def _give_up(self) -> None:
        """The client is closed before it could be submitted."""
        assert self._queued is not None
        if not self._queued.is_set():
            logger.warning("trace %s was not submitted: its client was closed before", self.id)
            self._refused = ClientClosed("the client is closed")
            self._queued.set()

    async def steer(
        self,
        values: Mapping[str, Any] | None = None,
        /,
        *,
        if_version: int | None = None,
        by: str | None = None,
        **more: Any,
    ) -> int:
        """Change its live parameters: `Client.steer`."""
        await self._submitted()
        return await super().steer(values, if_version=if_version, by=by, **more)

    async def cancel(self, reason: str = "", *, by: str | None = None) -> bool:
        """Have it end now, as `cancelled`: `Client.cancel`."""
        await self._submitted()
        return await super().cancel(reason, by=by)

    async def pause(self, *, by: str | None = None) -> bool:
        """Hold it where it is: `Client.pause`."""
        await self._submitted()
        return await super().pause(by=by)

    async def resume(self, *, by: str | None = None) -> bool:
        """Let it go on: `Client.resume`."""
        await self._submitted()
        return await super().resume(by=by)

    async def _read_until(self, done: Callable[[], bool]) -> None:
        await self._submitted()
        await super()._read_until(done)

    async def aclose(self) -> None:
        """Stop reading, and cancel the trace if its end was not read and it is not detached.

        Idempotent, and finishes even when cancelled.
        """
        if self._queued is not None and not self._queued.is_set():
            if self._submission.detach:
                # It is to run: whoever gives up waiting leaves its submission to the client.
                await self._queued.wait()
            else:
                # When its turn comes it is passed by.
                self._withdrawn = True
                if self._starting is not None:
                    self._starting.cancel()
                    with anyio.CancelScope(shield=True):
                        await self._queued.wait()
        with anyio.CancelScope(shield=True):
            await super().aclose()

    # --- what it saved ------------------------------------------------------------------------------------------------

    @property
    def saves(self) -> dict[str, Any]:
        """What was saved, by name, once the end was read (by an iteration or `result()`): also what the trace shares.

        A name that was saved by one invoke (and choice) alone is that value; by several, a list of them in their order.

        A name that nothing is saved as raises a `SaveMissing`, with the reason if it is known.

        Raises:
            TracewireError: the end was not read.
            StateMismatch: what arrived is not what the engine collected.
        """
        if not self._fold.finished:
            raise TracewireError(
                f"the saves of trace {self.id} are read at its end: iterate over it or await its result() first"
            )
        return merged(self._verified())


def merged(result: Result) -> dict[str, Any]:
    """The saves of all invokes and choices by name, as nnsight hands them back, and those of the trace."""
    found: dict[str, list[Any]] = {}
    for invoke in result.invokes:
        for choice in invoke.choices:
            for name, value in choice.saves.items():
                found.setdefault(name, []).append(value)
    one = {name: values[0] if len(values) == 1 else values for name, values in found.items()}
    saves = Saves({**one, **result.shared}, result.trace, ended=True)
    saves._reasons = {where.split(".", 2)[-1]: reason for where, reason in result.save_errors.items()}
    return saves


class Queueing:
    """Submissions of a client that nobody waits for, in the order in which they were queued."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._tasks: dict[Tracer, Background] = {}
        self._last: anyio.Event | None = None
        #: What the last one failed with, if Redis was away.
        self._away: BusUnavailable | None = None

    def add(self, tracer: Tracer) -> None:
        """Submit it in the background."""
        before, queued, added = self._last, anyio.Event(), anyio.current_time()
        tracer._queued = queued

        async def submit() -> None:
            try:
                if before is not None:
                    await before.wait()
                late = anyio.current_time() - added >= self._patience_s
                await tracer._submit(self._away if late else None)
                self._away = tracer._refused if isinstance(tracer._refused, BusUnavailable) else None
            finally:
                self._tasks.pop(tracer, None)

        try:
            self._tasks[tracer] = Background(submit, f"that submits trace {tracer.id}")
        except RuntimeError:
            tracer._queued = None
            raise TracewireError("a trace is queued in the background: write its with in a coroutine") from None
        self._last = queued

    async def empty(self) -> None:
        """Wait until all are durable or refused, for as long as the client is patient."""
        with anyio.move_on_after(self._patience_s):
            await self._empty()

    async def _empty(self) -> None:
        while self._tasks:
            tracer = next(iter(self._tasks))
            assert tracer._queued is not None
            await tracer._queued.wait()
            self._tasks.pop(tracer, None)

    async def aclose(self) -> None:
        """Give up what is not submitted within two seconds."""
        with anyio.move_on_after(_LEAVE_S):
            await self._empty()
        left = dict(self._tasks)
        for tracer in left:
            tracer._give_up()
        for task in left.values():
            task.cancel()
        for task in left.values():
            await task.aclose()


# --- invokes ----------------------------------------------------------------------------------------------------------


class Invoker:
    """One `with tracer.invoke(prompt):`. Its body is captured with what its names mean as it is left."""

    def __init__(self, tracer: Tracer, scope: _TraceScope, prompt: Any, sampling: dict[str, Any]) -> None:
        self._tracer = tracer
        self._scope = scope
        self._prompt = prompt
        self._sampling = sampling
        self._body: _Body | None = None

    def __enter__(self) -> None:
        self._body = _Body(sys._getframe(1), "tracer.invoke(...)")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        from tracewire.client import Prompt

        body, self._body = self._body, None
        assert body is not None
        if not body.left(kind):
            return False
        block: Block | None = None
        try:
            if not body.source.is_empty:
                block = self._scope.capture(body)
            if self._prompt is not None:
                self._scope.prompts.append(Prompt(self._prompt, block=block, **self._sampling))
            elif block is not None:
                raise TraceRejected(
                    "prompt",
                    "an invoke without a prompt has no request that its block could run on: tracer.invoke(prompt)",
                    filename=body.source.filename,
                    line=body.source.node.lineno,
                )
        except BaseException as problem:
            if problem.__context__ is error:
                problem.__context__ = None
            raise
        return True


class _TraceScope:
    """The body of a trace without a prompt, which runs here to find its invokes."""

    def __init__(self, tracer: Tracer, body: _Body, shared: dict[str, Any]) -> None:
        self._tracer = tracer
        self._body = body
        self.prompts: list[PromptInput] = []
        #: First values of what the invokes share, by name.
        self.shared = shared
        #: What the scope itself has saved, by identity, and held.
        self._saved: dict[int, Any] = {}
        self._names: dict[int, str] = {}
        self._namespace: dict[str, Any] = {}

    def run(self) -> list[PromptInput]:
        """Run it, and return the prompts of its invokes."""
        source = self._body.source
        namespace = self._namespace = {**self._body.frame.f_globals, **self._body.frame.f_locals, _SHARE: self._share}
        own = {name for name, value in namespace.items() if value is self._tracer}
        statements = [_Saves(own, namespace).visit(one) for one in copy.deepcopy(source.node.body)]
        module = ast.fix_missing_locations(ast.Module(body=statements, type_ignores=[]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            code = compile(module, source.filename, "exec", dont_inherit=True)
        exec(code.replace(co_name=self._body.frame.f_code.co_name), namespace)
        for name, value in namespace.items():
            if id(value) in self._saved and self._names.setdefault(id(value), name) == name:
                self.shared[name] = value
        for key, name in self._names.items():
            if key in self._saved and namespace.get(name) is not self._saved[key]:
                raise source.error(f"{name!r} is shared by the invokes, and cannot be bound to something else later on")
        if not self.prompts:
            raise TraceRejected(
                "prompt",
                "expected a prompt, in model.trace(prompt) or in a `with tracer.invoke(prompt):` in its body",
                filename=source.filename,
                line=source.node.lineno,
            )
        return self.prompts

    def _share(self, value: Any, line: int) -> Any:
        from tracewire_bus.wire.values import is_array

        if not isinstance(value, list | dict) and not is_array(value):
            raise self._body.source.error(
                f"what is saved around the invokes is shared by them, which a value of type {type_name(type(value))} "
                "cannot be: use a list, a dict or an array, or save it in each invoke",
                line,
            )
        self._saved[id(value)] = value
        return value

    def capture(self, body: _Body) -> Block:
        """The block of an invoke."""
        scope = body.scope
        for name, value in self._namespace.items():
            if id(value) in self._saved:
                self._names.setdefault(id(value), name)
        return capture(body.source, scope, self._tracer, self._names, self.shared)


_SHARE = "_tw_share"
#: Modules whose `save(value)` saves.
_SAVERS = ("nnsight", "tracewire")


class _Saves(ast.NodeTransformer):
    """Makes `x.save()`, `nnsight.save(x)` and `tracewire.save(x)` of a trace scope share `x`.

    The bodies of the invokes are left alone.
    """

    def __init__(self, tracers: set[str], namespace: Mapping[str, Any]) -> None:
        self._tracers = tracers
        self._namespace = namespace

    def visit_With(self, node: ast.With) -> ast.AST:
        """Not the bodies of invokes."""
        for item in node.items:
            match item.context_expr:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="invoke")) if name in self._tracers:
                    return node
        return self.generic_visit(node)

    def _function(self, node: ast.AST) -> ast.AST:
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = visit_ClassDef = _function

    def _names_a_saver(self, name: str) -> bool:
        module = self._namespace.get(name)
        return name in _SAVERS if module is None else getattr(module, "__name__", "") in _SAVERS

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A save, perhaps."""
        self.generic_visit(node)
        saved: ast.expr | None = None
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr="save"), args=[], keywords=[]):
                saved = value
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="save"), args=[value], keywords=[]) if (
                self._names_a_saver(name)
            ):
                saved = value
            case ast.Call(func=ast.Name(id=name), args=[value], keywords=[]):
                function = self._namespace.get(name)
                if getattr(function, "__name__", "") == "save" and _is_a_saver(function):
                    saved = value
        if saved is None:
            return node
        share = ast.Call(ast.Name(_SHARE, ast.Load()), [saved, ast.Constant(node.lineno)], [])
        return ast.copy_location(share, node)


def _is_a_saver(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] in _SAVERS


# --- what a body takes along ------------------------------------------------------------------------------------------


class _WithCapture(Capture):
    """What the names of a `with` body stand for."""

    def __init__(self, parameters: tuple[str, str, str], tracer: Tracer, shared: Mapping[int, str]) -> None:
        super().__init__(parameters, {})
        self._tracer = tracer
        self._shared_by = shared

    def bind(self, name: str, value: Any, source: FunctionSource, line: int) -> None:
        """Bind `name` to `value`, which may be the trace's own."""
        if isinstance(value, Model) and value.name != self._tracer.model:
            raise source.error(
                f"{name!r} is the model {value.name!r}, and the trace is one of {self._tracer.model!r}", line
            )
        if isinstance(value, Trace | Invoker):
            other = " of another trace" if value is not self._tracer else f", called {self._parameters[1]!r} before"
            raise self._untransportable(name, f"{name!r} is the tracer{other}", source, line)
        if id(value) in self._shared_by:
            self.shared[name] = self._shared_by[id(value)]
        else:
            super().bind(name, value, source, line)


def capture(
    source: WithSource,
    scope: Mapping[str, Any],
    tracer: Tracer,
    shared: Mapping[int, str],
    offered: Mapping[str, Any],
) -> Block:
    """The block of a `with` body, with what its names mean in `scope`.

    `shared` names the values that the trace shares by identity, `offered` has them by name.

    Raises:
        BlockError: a name that stands for nothing, or for two different things.
        UntransportableVariable: a value that cannot travel.
    """
    names = source.names
    used = {**names.possible, **names.required}
    first = sorted(used, key=lambda name: used[name])
    models = [name for name in first if isinstance(value := scope.get(name), Model) and value.name == tracer.model]
    tracers = [name for name in first if scope.get(name) is tracer]
    parameters = (models[0] if models else "_tw_model", tracers[0] if tracers else "_tw_tracer", "_tw_live")
    capturing = _WithCapture(parameters, tracer, shared)
    capturing.offered = frozenset(offered)
    for name, line in names.required.items():
        if name in ENGINE_NAMES or name in parameters:
            continue
        if name in scope and name not in offered:
            capturing.bind(name, scope[name], source, line)
        elif name in offered or not hasattr(builtins, name):
            capturing.bind_absent(name, source, line)
    for name, line in names.possible.items():
        if name in offered:
            capturing.bind_absent(name, source, line)
        if name in parameters or name in offered or name not in scope:
            continue
        try:
            capturing.bind(name, scope[name], source, line)
        except (BlockError, UntransportableVariable):
            # Most likely bound in the block before it is used; if not, the engine says so.
            continue
    return capturing.block(source.name, source)
