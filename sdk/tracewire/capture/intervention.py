"""Interventions: functions whose bodies, the *blocks*, run in a model's forward pass on the engine.

A block travels as source text with the values of its names. This limits a block in two ways:

- The body must be valid outside a function: it cannot `return`, `yield` or `await`. Rebinding a name on the engine does
  not change it here; the block saves its outputs (`.save()`).
- The value of each name must be able to travel (`capture.py`).

The client looks names up when the block is submitted, as a call of the function would at that time: first the variables
bound by `watch(direction=d)`, then the function's closure, its module's globals, and Python's builtins. Names in a
function that the block calls are looked up where that function was defined. On the engine all of them share one
namespace, so the client refuses a name that has two different values.

The source need not run here. The body can import modules that exist only on the engine, and so can the module above it
under `if TYPE_CHECKING:`. `nnsight` and `torch` need no import at all.
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
from tracewire_bus.domain.python_source import parse_source
from tracewire_bus.wire.messages import Block

from .capture import MISSING, BlockFunction, Capture, brief, defaults_of
from .source import find

__all__ = ["Intervention", "intervention", "live_reads", "save"]


_T = TypeVar("_T")


def intervention(function: Callable[..., Any]) -> Intervention:
    """Make a block of a function `(model, tracer, live, **variables)` whose body is an nnsight block.

    The engine binds the first three parameters, under any names: the model, the tracer and the live parameters. Further
    parameters are *variables*. Calling the intervention binds them, and defaults apply to the others. A parameter such
    as `**variables` allows variables of any name, which the body uses by these names.

        @tracewire.intervention
        def watch(model, tracer, live, direction):
            scores = [].save()
            for step in tracer.iter[:]:
                scores.append((model.model.layers[2].output[0] @ direction).item())

        client.trace(model, prompt, watch(direction=d))

    Raises:
        BlockError: the body has statements that no block can have, or its source cannot be read.
        TypeError: `function` is not a function.
    """
    return Intervention(function)


def save(value: _T) -> _T:
    """In a block, save `value` and return it, like `value.save()`, which type checkers do not know.

        scores: list[float] = tracewire.save([])

    Raises:
        BlockOnly: the call is outside a block.
    """
    nnsight = sys.modules.get("nnsight")
    if nnsight is None:
        raise BlockOnly("tracewire.save() belongs in a block, which runs on the engine")
    return cast(_T, nnsight.save(value))


# Blocks import it by this name.
save.__module__ = "tracewire"


class Intervention(BlockFunction):
    """A block with variables bound to it. Calling it returns a new intervention with more variables bound."""

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
                "move their code into its body, and keep @tracewire.intervention alone",
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
                f"{function.__name__} is a coroutine function, and a block runs inside the forward pass: write def"
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
                f"an intervention is not a method: its first parameter is the model, not {positional[0]!r}; "
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

    # --- properties ---------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The function's name."""
        return self._function.__name__

    @property
    def parameters(self) -> tuple[str, str, str]:
        """The body's names for the model, the tracer and the live parameters."""
        return self._parameters

    @property
    def variables(self) -> Mapping[str, Any]:
        """The variables bound so far, by name."""
        return types.MappingProxyType(self._bound)

    @property
    def required(self) -> list[str]:
        """The names of the variables that are not bound and have no default."""
        defaults = defaults_of(self._function)
        return [name for name in self._variables if name not in self._bound and name not in defaults]

    @property
    def source(self) -> str:
        """The source text of the body."""
        return self._source.body[0]

    @property
    def filename(self) -> str:
        """The file of the source."""
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
            TypeError: the function does not take such a variable, or a variable is passed by position.
        """
        if values:
            example = ", ".join(f"{name}=..." for name in self._variables) or "name=..."
            raise TypeError(
                f"{self.name}() binds variables by name, as in {self.name}({example}); only the engine runs its body"
            )
        for name in variables:
            if name in self._parameters:
                raise TypeError(f"{self.name}(): the engine binds {name!r}, which is not a variable")
            if name not in self._variables and (self._rest is None or name == self._rest):
                taken = ", ".join(self._variables) or "none"
                raise TypeError(f"{self.name}() takes no variable {name!r} (variables: {taken})")
            if not name.isidentifier() or keyword.iskeyword(name):
                raise TypeError(f"{self.name}(): {name!r} is not a valid name for a variable")
        bound = Intervention.__new__(Intervention)
        bound.__dict__.update(self.__dict__)
        bound._bound = {**self._bound, **variables}
        return bound

    def block(self, shared: Collection[str] = ()) -> Block:
        """The message of the block, with the present values of its names.

        `shared` are the names of the trace's shared values. They apply to variables that are not bound, and to names
        from around the function.

        Raises:
            BlockError: a name is not defined, or has two different values.
            UntransportableVariable: a value cannot travel.
            TraceRejected: a variable has no value (field `"variables.NAME"`).
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
    """The live parameters that a block's source reads by name outside `try` statements, each with its line there.

    `tracer` and `live` are the block's names for these. Returns `()` if the block rebinds one of these names.
    """
    found: list[tuple[str, int]] = []
    waiting: list[ast.AST] = [parse_source(source)]
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
