"""Bodies of `with` statements as blocks: the client skips them, and captures them with the values of their names.

Entering the `with` finds its body in the source. A trace function then raises at the body's first line, which is
Python's only way to skip a body. The client needs neither nnsight, torch nor the model for it.
"""

from __future__ import annotations

import ast
import builtins
import copy
import sys
import warnings
from collections import ChainMap
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from tracewire.capture.capture import ENGINE_NAMES, MISSING, Capture, ModelHandle
from tracewire.capture.with_source import WithSource, find_with
from tracewire.checks import type_name
from tracewire.errors import BlockError, TraceRejected, UntransportableVariable
from tracewire.submission import Prompt

from .trace import Trace

if TYPE_CHECKING:
    from tracewire.capture.source import FunctionSource
    from tracewire.submission import PromptInput
    from tracewire_bus.wire.messages import Block

__all__ = ["Invoker", "TraceScope", "WithBody", "capture_body"]


class _Skipped(BaseException):
    """Raised at a `with` body's first line to skip the body. The same `with` catches it."""


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
        """Restore the trace functions that were set before, such as a debugger's or coverage's."""
        whole, self._frame.f_trace = self._displaced
        sys.settrace(whole)


def _nothing(frame: FrameType, event: str, argument: Any) -> None:
    """A trace function, as for `sys.settrace`, that does nothing."""


class WithBody:
    """The body of a `with`, from entering to leaving it."""

    def __init__(self, frame: FrameType, name: str) -> None:
        self.frame = frame
        self.source = find_with(frame, name)
        if not self.source.is_empty:
            _ = self.source.checked
        self._skip = None if self.source.is_empty else _Skip(self.source, frame)

    def disarm(self) -> None:
        """Stop skipping the body."""
        if self._skip is not None:
            self._skip.disarm()

    def was_skipped(self, kind: type[BaseException] | None) -> bool:
        """Whether the body was skipped and is to be sent. If not, the caller lets the body's exception pass.

        Raises:
            BlockError: the body ran here.
        """
        if self._skip is None:
            return kind is None
        self._skip.disarm()
        if kind is None:
            raise self.source.error("the block ran here instead of being captured: something else traces this thread")
        return kind is _Skipped

    @property
    def scope(self) -> Mapping[str, Any]:
        """The values of the names around the `with` block."""
        return ChainMap(self.frame.f_locals, self.frame.f_globals)


class Invoker:
    """One `with tracer.invoke(prompt):`. Its body is captured with the values of its names when it is left."""

    def __init__(self, tracer: Trace, scope: TraceScope, prompt: Any, sampling: dict[str, Any]) -> None:
        self._tracer = tracer
        self._scope = scope
        self._prompt = prompt
        self._sampling = sampling
        self._body: WithBody | None = None

    def __enter__(self) -> None:
        self._body = WithBody(sys._getframe(1), "tracer.invoke(...)")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        body, self._body = self._body, None
        assert body is not None
        if not body.was_skipped(kind):
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


class TraceScope:
    """The body of a trace without a prompt, which runs here to find its invokes."""

    def __init__(self, tracer: Trace, body: WithBody, shared: dict[str, Any]) -> None:
        self._tracer = tracer
        self._body = body
        self.prompts: list[PromptInput] = []
        #: First values of the shared values, by name.
        self.shared = shared
        #: The objects that the scope itself has saved, by identity. The scope keeps them alive.
        self._saved: dict[int, Any] = {}
        self._names: dict[int, str] = {}
        self._namespace: dict[str, Any] = {}

    def run(self) -> list[PromptInput]:
        """Run it, and return the prompts of its invokes."""
        source = self._body.source
        namespace = self._namespace = {**self._body.frame.f_globals, **self._body.frame.f_locals, _SHARE: self._share}
        own = {name for name, value in namespace.items() if value is self._tracer._known_as}
        statements = [_Saves(own, namespace).visit(one) for one in copy.deepcopy(source.node.body)]
        module = ast.fix_missing_locations(ast.Module(body=statements, type_ignores=[]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            code = compile(module, source.filename, "exec", dont_inherit=True)
        # The caller's own source, in the caller's process.
        exec(code.replace(co_name=self._body.frame.f_code.co_name), namespace)  # noqa: S102  # nosec B102
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
        from tracewire_bus.wire.kinds import is_array

        if not isinstance(value, list | dict) and not is_array(value):
            raise self._body.source.error(
                f"the invokes share values that are saved around them, and cannot share one of type "
                f"{type_name(type(value))}: use a list, a dict or an array, or save it in each invoke",
                line,
            )
        self._saved[id(value)] = value
        return value

    def capture(self, body: WithBody) -> Block:
        """The block of an invoke."""
        scope = body.scope
        for name, value in self._namespace.items():
            if id(value) in self._saved:
                self._names.setdefault(id(value), name)
        return capture_body(body.source, scope, self._tracer, self._names, self.shared)


_SHARE = "_tw_share"
#: Modules whose `save(value)` saves.
_SAVE_MODULES = ("nnsight", "tracewire")


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

    def _is_save_module(self, name: str) -> bool:
        module = self._namespace.get(name)
        return name in _SAVE_MODULES if module is None else getattr(module, "__name__", "") in _SAVE_MODULES

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A save, perhaps."""
        self.generic_visit(node)
        saved: ast.expr | None = None
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr="save"), args=[], keywords=[]):
                saved = value
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="save"), args=[value], keywords=[]) if (
                self._is_save_module(name)
            ):
                saved = value
            case ast.Call(func=ast.Name(id=name), args=[value], keywords=[]):
                function = self._namespace.get(name)
                if getattr(function, "__name__", "") == "save" and _is_save_function(function):
                    saved = value
        if saved is None:
            return node
        share = ast.Call(ast.Name(_SHARE, ast.Load()), [saved, ast.Constant(node.lineno)], [])
        return ast.copy_location(share, node)


def _is_save_function(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] in _SAVE_MODULES


class _WithCapture(Capture):
    """Finds the values of the names in a `with` body."""

    def __init__(self, parameters: tuple[str, str, str], tracer: Trace, shared: Mapping[int, str]) -> None:
        super().__init__(parameters, {})
        self._tracer = tracer
        self._shared_by = shared

    def bind(self, name: str, value: Any, source: FunctionSource, line: int) -> None:
        """Bind `name` to `value`, which may be the trace's own."""
        if isinstance(value, ModelHandle) and value.name != self._tracer.model:
            raise source.error(
                f"{name!r} is the model {value.name!r}, and the trace is one of {self._tracer.model!r}", line
            )
        if isinstance(value, Trace | Invoker):
            own = value is self._tracer._known_as
            other = f", called {self._parameters[1]!r} before" if own else " of another trace"
            raise self.untransportable(name, f"{name!r} is the tracer{other}", source, line)
        if id(value) in self._shared_by:
            self.shared[name] = self._shared_by[id(value)]
        else:
            super().bind(name, value, source, line)


def capture_body(
    source: WithSource,
    scope: Mapping[str, Any],
    tracer: Trace,
    shared: Mapping[int, str],
    offered: Mapping[str, Any],
) -> Block:
    """The block of a `with` body, with the values of its names in `scope`.

    `shared` names the values that the trace shares by identity, `offered` has them by name.

    Raises:
        BlockError: a name is not defined, or has two different values.
        UntransportableVariable: a value cannot travel.
    """
    names = source.names
    used = {**names.possible, **names.required}
    first = sorted(used, key=lambda name: used[name])
    models = [
        name for name in first if isinstance(value := scope.get(name), ModelHandle) and value.name == tracer.model
    ]
    tracers = [name for name in first if scope.get(name) is tracer._known_as]
    parameters = (models[0] if models else "_tw_model", tracers[0] if tracers else "_tw_tracer", "_tw_live")
    capturing = _WithCapture(parameters, tracer, shared)
    capturing.shareable = frozenset(offered)
    capturing.around = scope

    def meaning(name: str) -> Any:
        return scope.get(name, MISSING)

    for name, line in names.required.items():
        if name in ENGINE_NAMES or name in parameters:
            continue
        try:
            if name in scope and name not in offered:
                capturing.bind(name, scope[name], source, line)
            elif name in offered or not hasattr(builtins, name):
                capturing.bind_absent(name, source, line)
        except (BlockError, UntransportableVariable):
            if not capturing.is_dead(name, source, meaning):
                raise
    for name, line in names.possible.items():
        if name in offered:
            capturing.bind_absent(name, source, line)
        if name in parameters or name in offered or name not in scope:
            continue
        try:
            capturing.bind(name, scope[name], source, line)
        except (BlockError, UntransportableVariable):
            # Most likely the block assigns to the name before it uses it. If not, the engine reports the missing name.
            continue
    return capturing.block(source.name, source)
