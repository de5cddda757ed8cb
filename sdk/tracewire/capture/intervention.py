"""Blocks: functions whose bodies run inside a model's forward pass, on the engine, and never here.

A block travels as *source text* plus what it uses. So two things decide what a block can be. Its body must mean the
same without a function around it: it cannot `return`, `yield` or `await`, and nothing that it rebinds comes back
(`.save()` is the way out). And every name that it uses must stand for something that can travel: a plain value or an
array (by value), a function or class of one's own (as source, with what it uses in turn), a module, or a class or
function of an installed package (by name), or a module of the served model (by path). Objects are taken apart into
these (`objects.py`). Of a module of one's own, what is used of it travels, each thing as if it had been imported by its
name.

The names are looked up when the block is submitted, as a call of the function would look them up then: variables bound
by `watch(direction=d)` first, then the function's closure, its module's globals, and Python's builtins. A name in a
function that the block calls is looked up where *that* function was defined. All of them share one namespace on the
engine, so that a name which means two things in two of them is refused.

The source need not be runnable here. Modules that exist only on the engine can be imported in the body, or above it
under `if TYPE_CHECKING:`; `nnsight` and `torch` need no import at all.
"""

from __future__ import annotations

import ast
import keyword
import sys
import types
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache, update_wrapper
from typing import Any, TypeVar, cast

from tracewire.checks import type_name
from tracewire.errors import BlockError, BlockOnly, TraceRejected
from tracewire_bus.wire.messages import Block

from .capture import MISSING, BlockFunction, Capture, brief, defaults_of
from .source import find

__all__ = ["Intervention", "intervention", "live_reads", "save"]


_T = TypeVar("_T")


def intervention(function: Callable[..., Any]) -> Intervention:
    """Make a block of a function `(model, tracer, live, **variables)`, whose body is written as any nnsight block.

    The first three parameters, whatever they are called, are bound by the engine: the model, the tracer and the live
    parameters. Further ones are *variables*: bound by calling the intervention, or by their defaults. A parameter such
    as `**variables` allows variables of any name, each of which the body can use by that name.

        @tracewire.intervention
        def watch(model, tracer, live, direction):
            scores = [].save()
            for step in tracer.iter[:]:
                scores.append((model.model.layers[2].output[0] @ direction).item())

        client.trace(model, prompt, watch(direction=d))

    Raises:
        BlockError: naming file and line, for what no block can do, and where there is no source.
    """
    return Intervention(function)


def save(value: _T) -> _T:
    """In a block: save `value`, and return it, as `value.save()` does. Type checkers know this one.

        scores: list[float] = tracewire.save([])

    Raises:
        BlockOnly: it is called outside a block.
    """
    nnsight = sys.modules.get("nnsight")
    if nnsight is None:
        raise BlockOnly("tracewire.save() belongs into a block, which runs on the engine")
    return cast(_T, nnsight.save(value))


# How blocks import it, wherever it stands.
save.__module__ = "tracewire"


class Intervention(BlockFunction):
    """A block, and the variables bound to it. Calling it binds more of them, and returns a new one."""

    __wrapped__: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        if isinstance(function, staticmethod):
            function = function.__func__
        if isinstance(function, Intervention):
            raise TypeError(f"{function.name} is an intervention already")
        if not isinstance(function, types.FunctionType):
            raise TypeError(f"an intervention is made of a function, not of {type_name(type(function))}")
        if hasattr(function, "__wrapped__"):
            raise BlockError(
                f"{function.__name__} is decorated already, and decorators do not travel: "
                "put what they do into its body, and leave @tracewire.intervention alone",
                filename=function.__code__.co_filename,
                line=function.__code__.co_firstlineno,
            )
        self._function = function
        self._source = find(function)
        self._bound: dict[str, Any] = {}
        node = self._source.node
        if isinstance(node, ast.Lambda):
            raise self._source.error("a lambda holds one expression only: write the intervention as a def")
        if isinstance(node, ast.AsyncFunctionDef):
            raise self._source.error(
                f"{function.__name__} is a coroutine function; a block runs inside the forward pass: write def"
            )
        self._parameters, self._variables, self._rest = self._read_signature()
        self._source.check_block()
        update_wrapper(self, function)

    def _read_signature(self) -> tuple[tuple[str, str, str], list[str], str | None]:
        assert isinstance(self._source.node, ast.FunctionDef)
        arguments = self._source.node.args
        positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        expected = f"def {self._function.__name__}(model, tracer, live, **variables)"
        if positional[:1] in (["self"], ["cls"]):
            raise self._source.error(
                f"an intervention is no method: its first parameter is the model, not {positional[0]!r}; "
                f"expected {expected}"
            )
        if arguments.vararg is not None:
            raise self._source.error(
                f"variables are bound by name, not by *{arguments.vararg.arg}; expected {expected}"
            )
        if len(positional) < 3:
            named = ", ".join(positional) or "none"
            raise self._source.error(
                f"an intervention takes three parameters first, the model, the tracer and the live parameters "
                f"(these are positional here: {named}); expected {expected}"
            )
        first = (positional[0], positional[1], positional[2])
        defaults = self._source.default_names()
        for name in first:
            if name in defaults:
                raise self._source.error(
                    f"{name!r} is bound by the engine and has no default: the model, the tracer and the live "
                    f"parameters come before all variables; expected {expected}"
                )
        variables = [*positional[3:], *(argument.arg for argument in arguments.kwonlyargs)]
        return first, variables, arguments.kwarg.arg if arguments.kwarg else None

    # --- what it is ---------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The function's name."""
        return self._function.__name__

    @property
    def parameters(self) -> tuple[str, str, str]:
        """What the body calls the model, the tracer and the live parameters."""
        return self._parameters

    @property
    def variables(self) -> Mapping[str, Any]:
        """The variables bound so far, by name."""
        return types.MappingProxyType(self._bound)

    @property
    def source(self) -> str:
        """The body as it travels."""
        return self._source.body[0]

    @property
    def filename(self) -> str:
        """The file that the source is from."""
        return self._source.filename

    @property
    def first_line(self) -> int:
        """The line in that file at which `source` begins."""
        return self._source.body[1]

    def __repr__(self) -> str:
        defaults = self._source.default_names()
        shown = list(self._parameters)
        for name in self._variables:
            if name in self._bound:
                shown.append(f"{name}={brief(self._bound[name])}")
            else:
                shown.append(f"{name}={ast.unparse(defaults[name])}" if name in defaults else name)
        shown += [f"{name}={brief(value)}" for name, value in self._bound.items() if name not in self._variables]
        if self._rest:
            shown.append(f"**{self._rest}")
        return f"<intervention {self.name}({', '.join(shown)}) at {self.filename}:{self._source.node.lineno}>"

    # --- binding ------------------------------------------------------------------------------------------------------

    def __call__(self, /, *values: Any, **variables: Any) -> Intervention:
        """A new intervention with these variables bound as well.

        Raises:
            TypeError: a variable that the function does not take, or one passed by position.
        """
        if values:
            example = ", ".join(f"{name}=..." for name in self._variables) or "name=..."
            raise TypeError(
                f"{self.name}() binds variables by name, as in {self.name}({example}); it is not called here"
            )
        for name in variables:
            if name in self._parameters:
                raise TypeError(f"{self.name}(): {name!r} is bound by the engine, and is no variable")
            if name not in self._variables and (self._rest is None or name == self._rest):
                taken = ", ".join(self._variables) or "none"
                raise TypeError(f"{self.name}() takes no variable {name!r} (variables: {taken})")
            if not name.isidentifier() or keyword.iskeyword(name):
                raise TypeError(f"{self.name}(): {name!r} is no name that a body can use")
        bound = Intervention.__new__(Intervention)
        bound.__dict__.update(self.__dict__)
        bound._bound = {**self._bound, **variables}
        return bound

    def block(self, shared: Collection[str] = ()) -> Block:
        """The block as it travels, with the values that the names in it have now.

        `shared` are the names of the trace's shared values, which variables bound to nothing else, and names that the
        function takes from around it, then stand for.

        Raises:
            BlockError: a name that stands for nothing, or for two different things.
            UntransportableVariable: a value that cannot travel.
            TraceRejected: a variable without a value (field `"variables.NAME"`).
        """
        capture = Capture(self.parameters, self._bound)
        line = self._source.node.lineno
        defaults = defaults_of(self._function)
        for name in self._variables:
            value = self._bound.get(name, MISSING)
            if value is MISSING and name in shared:
                capture.shared[name] = name
                continue
            value = defaults.get(name, MISSING) if value is MISSING else value
            if value is MISSING:
                raise TraceRejected(
                    f"variables.{name}",
                    f"{self.name} needs a value for {name!r}, as in {self.name}({name}=...)",
                    filename=self.filename,
                    line=line,
                )
            self._bind_variable(capture, name, value)
        for name, value in self._bound.items():
            if name not in self._variables:
                self._bind_variable(capture, name, value)
        if self._rest and any(isinstance(n, ast.Name) and n.id == self._rest for n in ast.walk(self._source.node)):
            extra = {name: value for name, value in self._bound.items() if name not in self._variables}
            capture.bind(self._rest, extra, self._source, line)
        capture.shareable = frozenset(shared) - self._bound.keys()
        capture.names_of(self._function, self._source, block=True)
        return capture.block(self.name, self._source)

    def _bind_variable(self, capture: Capture, name: str, value: Any) -> None:
        try:
            capture.bind(name, value, self._source, self._source.node.lineno)
        except TraceRejected:
            if not capture.is_dead(name, self._source, lambda one: self._bound.get(one, MISSING)):
                raise


@lru_cache(maxsize=512)
def live_reads(source: str, tracer: str, live: str) -> tuple[tuple[str, int], ...]:
    """The live parameters that a block's source reads by name, each with its line there, but for those inside a `try`.

    `tracer` and `live` are what the block calls these. None if it gives such a name another meaning.
    """
    found: list[tuple[str, int]] = []
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Try | ast.TryStar):
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and not node.attr.startswith("_"):
            match node.value:
                case ast.Name(id=name) if name == live:
                    found.append((node.attr, node.lineno))
                case ast.Attribute(value=ast.Name(id=name), attr="live") if name == tracer:
                    found.append((node.attr, node.lineno))
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) and node.id in (tracer, live):
            return ()
        if isinstance(node, ast.arg) and node.arg in (tracer, live):
            return ()
        waiting += ast.iter_child_nodes(node)
    return tuple(sorted(found, key=lambda read: read[1]))
