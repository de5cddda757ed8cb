"""Blocks: functions whose bodies run inside a model's forward pass, on the engine, and never here.

A block travels as *source text* plus what it uses. So two things decide what a block can be. Its body must mean the
same without a function around it: it cannot `return`, `yield` or `await`, and nothing that it rebinds comes back
(`.save()` is the way out). And every name that it uses must stand for something that can travel: a plain value or an
array (by value), a function of one's own (as source, with what it uses in turn), a module, or a class or function of an
installed package (by name), or a module of the served model (by path). Of a module of one's own, what is used of it
travels, each thing as if it had been imported by its name.

The names are looked up when the block is submitted, as a call of the function would look them up then: variables bound
by `watch(direction=d)` first, then the function's closure, its module's globals, and Python's builtins. A name in a
function that the block calls is looked up where *that* function was defined. All of them share one namespace on the
engine, so that a name which means two things in two of them is refused.

The source need not be runnable here. What exists only on the engine can be imported in the body, or above
under `if TYPE_CHECKING:`; `nnsight` and `torch` need no import at all.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import inspect
import keyword
import struct
import sys
import types
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache, partial, update_wrapper
from typing import Any, TypeVar, cast

from tracewire.checks import type_name
from tracewire.errors import BlockError, BlockOnly, TraceRejected, UntransportableVariable
from tracewire.traces.model import Model
from tracewire_bus.wire.messages import Block, Helper

from .source import FunctionSource, find

__all__ = [
    "ENGINE_MODULES",
    "ENGINE_NAMES",
    "Capture",
    "Intervention",
    "intervention",
    "live_reads",
    "module_path",
    "save",
]

#: Modules that every engine has, whether or not the client does.
ENGINE_MODULES = ("nnsight", "torch", "tracewire")

#: Names that the engine binds in every block.
ENGINE_NAMES = frozenset({"__name__", "__builtins__", "__doc__", "__debug__"})

_MISSING = object()
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


class Intervention:
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
                shown.append(f"{name}={_brief(self._bound[name])}")
            else:
                shown.append(f"{name}={ast.unparse(defaults[name])}" if name in defaults else name)
        shown += [f"{name}={_brief(value)}" for name, value in self._bound.items() if name not in self._variables]
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
        defaults = _defaults(self._function)
        for name in self._variables:
            value = self._bound.get(name, _MISSING)
            if value is _MISSING and name in shared:
                capture.shared[name] = name
                continue
            value = defaults.get(name, _MISSING) if value is _MISSING else value
            if value is _MISSING:
                raise TraceRejected(
                    f"variables.{name}",
                    f"{self.name} needs a value for {name!r}, as in {self.name}({name}=...)",
                    filename=self.filename,
                    line=line,
                )
            capture.bind(name, value, self._source, line)
        for name, value in self._bound.items():
            if name not in self._variables:
                capture.bind(name, value, self._source, line)
        if self._rest and any(isinstance(n, ast.Name) and n.id == self._rest for n in ast.walk(self._source.node)):
            extra = {name: value for name, value in self._bound.items() if name not in self._variables}
            capture.bind(self._rest, extra, self._source, line)
        capture.offered = frozenset(shared) - self._bound.keys()
        capture.names_of(self._function, self._source, block=True)
        return capture.block(self.name, self._source)


class Capture:
    """What the names of one block, and of the functions that it calls, stand for; all in one namespace."""

    def __init__(self, parameters: tuple[str, str, str], bound: Mapping[str, Any]) -> None:
        self.helpers: list[Helper] = []
        self.modules: dict[str, str] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        #: Modules of the model, by path; shared values of the trace, by their names there.
        self.paths: dict[str, str] = {}
        self.shared: dict[str, str] = {}
        #: Shared values that a name without any other meaning may stand for.
        self.offered: frozenset[str] = frozenset()
        self._values: dict[str, bytes] = {}
        #: Of modules of one's own, by the name that they have here: hidden names of what is used of them, by attribute.
        self._own: dict[str, dict[str, Any]] = {}
        #: What a hidden name is called in the source.
        self._spelled: dict[str, str] = {}
        self._meanings: dict[str, tuple[Any, FunctionSource]] = {}
        self._parameters = parameters
        self._bound = bound

    def block(self, name: str, source: FunctionSource) -> Block:
        """The block of this body, with what was captured."""
        text, line = source.body
        return Block(
            name=name,
            source=text,
            filename=source.filename,
            first_line=line,
            parameters=self._parameters,
            variables=self.packed(),
            helpers=[*self.helpers, *(_stand_in(name, used) for name, used in sorted(self._own.items()))],
            modules=dict(sorted(self.modules.items())),
            imports=dict(sorted(self.imports.items())),
            paths=dict(sorted(self.paths.items())),
            shared=dict(sorted(self.shared.items())),
        )

    def packed(self) -> bytes:
        """The plain values by name, as `pack` would make them of one dict; each is packed only once."""
        from tracewire_bus.wire.values import pack

        count = len(self._values)
        header = bytes([0x80 | count]) if count < 16 else struct.pack(">BH", 0xDE, count)
        return header + b"".join(pack(name) + self._values[name] for name in sorted(self._values))

    # --- names --------------------------------------------------------------------------------------------------------

    def names_of(self, function: types.FunctionType, source: FunctionSource, *, block: bool = False) -> None:
        """Bind every free name of `function` to what it stands for."""
        closure = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name, line in source.free_names.items():
            if name in ENGINE_NAMES:
                continue
            if block and name in self._bound:
                continue
            if name in self.offered:
                self.shared[name] = name
                continue
            value: Any = _MISSING
            if name in closure:
                try:
                    value = closure[name].cell_contents
                except ValueError:
                    raise source.error(f"the name {name!r} has no value yet", line) from None
            elif name in function.__globals__:
                value = function.__globals__[name]
            if value is not _MISSING:
                if name in self._parameters:
                    raise source.error(
                        f"{name!r} is what the block calls a parameter that the engine binds, and something else in "
                        f"{source.name}(): pass it to {source.name}() as an argument",
                        line,
                    )
                self.bind(name, value, source, line)
            elif not self._is_known(name):
                self.bind_absent(name, source, line)

    def _is_known(self, name: str) -> bool:
        """Whether the engine has a meaning for a name that has none here."""
        return name in self._bound or name in self._parameters or hasattr(builtins, name)

    def bind_absent(self, name: str, source: FunctionSource, line: int) -> None:
        """Bind a name without a value here: to what the trace shares, or by an `import` statement that did not run."""
        if name in self.offered:
            self.shared[name] = name
            return
        for module, attribute in source.module_imports.get(name, ()):
            if attribute is None:
                self.modules[name] = module
            else:
                self.imports[name] = (module, attribute)
            return
        if name in ENGINE_MODULES:
            self.modules[name] = name
            return
        candidates = {*self._parameters, *self._meanings, *vars(builtins)}
        near = difflib.get_close_matches(name, sorted(one for one in candidates if not one.startswith("_tw_")), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise source.error(
            f"the name {name!r} stands for nothing: it is no variable, and neither the closure of {source.name}() "
            f"nor its module has it{hint} (what exists on the engine only is imported in the body)",
            line,
        )

    # --- values -------------------------------------------------------------------------------------------------------

    def bind(self, name: str, value: Any, source: FunctionSource, line: int) -> None:
        """Bind `name`, used at `line` of `source`, to `value` as it travels."""
        if name in self._meanings:
            before, where = self._meanings[name]
            if not self._same(name, before, value):
                raise source.error(
                    f"the name {name!r} means {_brief(value)} in {source.name}() and {_brief(before)} in "
                    f"{where.name}(), and a block and its functions share one namespace: rename one of them",
                    line,
                )
            if name in self._own:
                self._bind_own_module(name, value, source)
            return
        self._meanings[name] = (value, source)
        if (path := module_path(value)) is not None:
            self.paths[name] = path
        elif isinstance(value, types.ModuleType):
            self._bind_module(name, value, source, line)
        elif isinstance(value, Intervention):
            spelled = self._spelled.get(name, name)
            reason = f"{spelled!r} is an intervention, and a block cannot call another"
            raise self._untransportable(spelled, reason, source, line)
        elif (importable := _importable(name, value, source)) is not None:
            self.imports[name] = importable
        elif isinstance(value, types.FunctionType):
            self._bind_function(name, value, source, line)
        else:
            self._bind_value(name, value, source, line)

    def _same(self, name: str, before: Any, value: Any) -> bool:
        if before is value:
            return True
        if name not in self._values or type(before) is not type(value):
            return False
        from tracewire_bus.wire.values import Unsavable, pack

        try:
            return pack(value) == self._values[name]
        except Unsavable:
            return False

    def _bind_module(self, name: str, module: types.ModuleType, source: FunctionSource, line: int) -> None:
        path = module.__name__
        if path == "__main__":
            raise self._untransportable(name, f"{name!r} is the program's own module __main__", source, line)
        if not _is_installed(path):
            self._bind_own_module(name, module, source)
            return
        self.modules[name] = path
        for use in source.uses(name):
            self._import_below(path, use.chain)

    def _import_below(self, path: str, chain: tuple[str, ...]) -> None:
        """`import xml.dom` binds xml alone; what the body reaches through it must be imported too."""
        for step in chain:
            path = f"{path}.{step}"
            if not isinstance(sys.modules.get(path), types.ModuleType):
                break
            self.modules["_tw_" + path.replace(".", "_")] = path

    def _bind_own_module(self, name: str, module: types.ModuleType, source: FunctionSource) -> None:
        """Bind what `source` uses of a module that no engine has."""
        known = self._own.setdefault(name, {})
        for use in source.uses(name):
            value, taken = module, known
            for depth, step in enumerate(use.chain, 1):
                spelled = ".".join((name, *use.chain[:depth]))
                try:
                    value = getattr(value, step)
                except AttributeError as error:
                    raise source.error(f"{spelled!r} stands for nothing: {error}", use.line) from None
                if isinstance(value, types.ModuleType) and not _is_installed(value.__name__):
                    taken = taken.setdefault(step, {})
                    continue
                hidden = f"_tw_{spelled.replace('.', '__')}"
                if use.changed and depth == len(use.chain):
                    raise source.error(
                        f"a block cannot change {spelled!r}: what it uses of your module is a copy", use.line
                    )
                self._spelled[hidden] = spelled
                self.bind(hidden, value, source, use.line)
                if isinstance(value, types.ModuleType):
                    self._import_below(value.__name__, use.chain[depth:])
                taken[step] = hidden
                break
            else:
                spelled = ".".join((name, *use.chain))
                reason = (
                    f"{spelled!r} is a module of your own, of which only what is used by name can travel: "
                    f"write {spelled}.NAME, or import NAME from it"
                )
                raise self._untransportable(spelled, reason, source, use.line)

    def _bind_function(self, name: str, function: types.FunctionType, source: FunctionSource, line: int) -> None:
        if hasattr(function, "__wrapped__"):
            raise source.error(
                f"{self._spelled.get(name, name)}() is decorated, and decorators do not travel: call a function "
                "without any, and put what the decorator does into its body",
                line,
            )
        definition = find(function)
        definition.check_helper()
        replaced: dict[ast.expr, str] = {}
        values = _defaults(function)
        for parameter, expression in definition.default_names().items():
            if isinstance(expression, ast.Constant):
                continue
            # The value that it has, not what its expression would give on the engine.
            hidden = f"_tw_{name}_{parameter}"
            self.bind(hidden, values[parameter], definition, expression.lineno)
            replaced[expression] = hidden
        self.helpers.append(
            Helper(
                name=name,
                source=definition.definition(name, replaced),
                filename=definition.filename,
                first_line=definition.node.lineno,
            )
        )
        self.names_of(function, definition)

    def _bind_value(self, name: str, value: Any, source: FunctionSource, line: int) -> None:
        from tracewire_bus.wire.values import ArrayRef, Unsavable, pack

        spelled = self._spelled.get(name, name)
        if isinstance(value, ArrayRef):
            reason = f"{spelled!r} is {value!r} of another trace: pass what its load() returns"
            raise self._untransportable(spelled, reason, source, line)
        try:
            self._values[name] = pack(value)
        except Unsavable as error:
            raise self._untransportable(spelled, _why(spelled, value, error), source, line) from None

    def _untransportable(self, name: str, reason: str, source: FunctionSource, line: int) -> UntransportableVariable:
        return UntransportableVariable(name, reason, filename=source.filename, line=line)


def _stand_in(name: str, used: Mapping[str, Any]) -> Helper:
    """What a module of one's own is on the engine: an object with what is used of it."""

    def spelled(used: Mapping[str, Any]) -> str:
        items = (f"{key}={value if isinstance(value, str) else spelled(value)}" for key, value in sorted(used.items()))
        return f"__import__('types').SimpleNamespace({', '.join(items)})"

    return Helper(name=name, source=f"{name} = {spelled(used)}", filename=f"<module {name}>", first_line=1)


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


def module_path(value: Any) -> str | None:
    """The path of what stands for a module of a served model on this side: its handle, its tree or a node of that."""
    from tracewire_bus.domain.tree import ModuleNode, ModuleTree

    if isinstance(value, ModuleNode):
        return value.path
    return "" if isinstance(value, Model | ModuleTree) else None


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    """Default values by parameter, as they were evaluated."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }


def _importable(name: str, value: Any, source: FunctionSource) -> tuple[str, str] | None:
    """Module and attribute by which an engine can import `value`: of an installed package, never of one's own code."""
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    candidates: list[tuple[Any, Any]] = []
    if isinstance(value, type) or callable(value):
        candidates.append((module, qualified))
        # Builtin functions of extension modules say little about themselves; an import statement may know.
        candidates += source.imports.get(name, ())
        candidates += [(star, name) for star, _ in source.imports.get("*", ())]
        candidates += [(root, getattr(value, "__name__", None)) for root in ("torch", "numpy")]
    elif type(value).__module__ == "torch" and type(value).__qualname__ == "dtype":
        candidates.append(("torch", str(value).rpartition(".")[2]))
    for module, path in candidates:
        if (
            isinstance(module, str)
            and isinstance(path, str)
            and _reaches(module, path, value)
            and _is_installed(module)
        ):
            return module, path
    return None


def _reaches(module: str, path: str, value: Any) -> bool:
    found: Any = sys.modules.get(module)
    for step in path.split("."):
        found = getattr(found, step, None)
    return found is value


def _is_installed(module: str) -> bool:
    """Whether a module belongs to Python or to an installed package, so that an engine can be expected to have it."""
    root = module.partition(".")[0]
    if root == "__main__":
        return False
    if root in sys.stdlib_module_names or root in ENGINE_MODULES:
        return True
    path = getattr(sys.modules.get(module), "__file__", None) or getattr(sys.modules.get(root), "__file__", None)
    return path is not None and any(
        part in ("site-packages", "dist-packages") for part in path.replace("\\", "/").split("/")
    )


def _why(name: str, value: Any, error: Exception) -> str:
    """Why `value` cannot travel, with what to write instead where that is known."""
    if isinstance(value, type):
        return f"{name!r} is a class of your own, {type_name(value)}; classes travel only from installed packages"
    if isinstance(value, types.MethodType):
        return f"{name!r} is a method bound to {type_name(type(value.__self__))}: write a function"
    if isinstance(value, partial):
        return f"{name!r} is a functools.partial: write a function around it"
    # What can travel is said by whoever raises this.
    reason = str(error).partition("; what can: None")[0]
    return f"{name!r} is of type {type_name(type(value))}: {reason}"


def _brief(value: Any) -> str:
    """A short text for a value: itself if it is small, else its type."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return f"{type_name(type(value))}{list(shape)}"
    if isinstance(value, types.FunctionType | types.ModuleType | type):
        return f"{type(value).__name__} {value.__name__}"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
