"""Capture: finds the value of each name in a block, and makes it a part of the message.

- Plain values and arrays travel by value.
- Functions and classes of the caller travel as source, together with the values of their own names.
- Modules of installed packages, and their classes and functions, travel by name.
- Modules of the served model travel by path.
- Other values travel as source that builds them on the engine from all of these (`objects.py`).

Of the caller's own modules, and of objects whose attributes the block only reads, the used attributes alone travel.
"""

from __future__ import annotations

import ast
import builtins
import enum
import inspect
import struct
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tracewire.checks import type_name
from tracewire.errors import BlockError, TraceRejected, UntransportableVariable
from tracewire_bus.wire.messages import Block, Helper

from .class_source import ClassSource, class_names, find_class
from .dead_code import is_dead
from .source import FunctionSource, Use, find

if TYPE_CHECKING:
    from .objects import Objects

__all__ = [
    "ENGINE_MODULES",
    "ENGINE_NAMES",
    "MISSING",
    "BlockFunction",
    "Capture",
    "ModelHandle",
    "brief",
    "defaults_of",
    "module_path",
]


#: Modules that every engine can import, even if the client cannot.
ENGINE_MODULES = ("nnsight", "torch", "tracewire")
#: Names that the engine binds in every block.
ENGINE_NAMES = frozenset({"__name__", "__builtins__", "__doc__", "__debug__"})
MISSING = object()
_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})


class BlockFunction:
    """Base of `Intervention`: a function whose body is a block. A block cannot call another block."""


class ModelHandle:
    """A client's handle of a served model. A name of such a handle means the model itself in a block."""

    name: str


class Capture:
    """The captured names of one block and of the functions and classes that it uses, all in one namespace.

    `parameters` are the block's names for the model, the tracer and the live parameters. `bound` are the variables
    that the caller has bound.
    """

    def __init__(self, parameters: tuple[str, str, str], bound: Mapping[str, Any]) -> None:
        self.helpers: list[Helper] = []
        self.modules: dict[str, str] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        #: For each name, the path of a module of the model; and the trace's name of a shared value.
        self.paths: dict[str, str] = {}
        self.shared: dict[str, str] = {}
        #: Names of the trace's shared values that a block's name without a value may mean.
        self.shareable: frozenset[str] = frozenset()
        self._values: dict[str, bytes] = {}
        #: Values of the names around a `with` block, for classes that the surrounding function defines.
        self.around: Mapping[str, Any] = {}
        #: The block's names of the caller's own modules, and of objects whose attributes the block only reads. Each has
        #: a hidden name for every attribute that the block uses.
        self._own_modules: dict[str, dict[str, Any]] = {}
        #: For each hidden name, the expression in the caller's source.
        self._written_as: dict[str, str] = {}
        #: For each bound name, its value and the source that uses the name.
        self._meanings: dict[str, tuple[Any, FunctionSource]] = {}
        self._parameters = parameters
        self._bound = bound

    def block(self, name: str, source: FunctionSource) -> Block:
        """The message of the block `name` with the body of `source` and all captured values."""
        text, line = source.body
        return Block(
            name=name,
            source=text,
            filename=source.filename,
            first_line=line,
            parameters=self._parameters,
            variables=self.packed(),
            helpers=[
                *self.helpers,
                *(_own_module_namespace(name, used) for name, used in sorted(self._own_modules.items())),
            ],
            modules=dict(sorted(self.modules.items())),
            imports=dict(sorted(self.imports.items())),
            paths=dict(sorted(self.paths.items())),
            shared=dict(sorted(self.shared.items())),
            arguments=sorted(self._values.keys() & set(self._bound)),
        )

    def packed(self) -> bytes:
        """The plain values by name, encoded as `pack` encodes one dict. Each value is packed only once."""
        from tracewire_bus.wire.packing import pack

        count = len(self._values)
        header = bytes([0x80 | count]) if count < 16 else struct.pack(">BH", 0xDE, count)
        return header + b"".join(pack(name) + self._values[name] for name in sorted(self._values))

    # --- names --------------------------------------------------------------------------------------------------------

    def names_of(self, function: types.FunctionType, source: FunctionSource, *, block: bool = False) -> None:
        """Bind every free name of `function` to its value. `block` says that the function is the block itself.

        Raises:
            BlockError: a name has no value, or two different ones.
            UntransportableVariable: a value cannot travel.
        """
        if not source.free_names:
            return
        closure = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

        def meaning(name: str) -> Any:
            return closure[name].cell_contents if name in closure else function.__globals__.get(name, MISSING)

        self._bind_names(source.free_names, meaning, source, self._bound if block else ())

    def _names_of_class(self, cls: type, source: ClassSource, names: Mapping[str, int]) -> None:
        around = self.around if "<locals>" in cls.__qualname__ else {}
        self._bind_names(names, class_names(cls, source, around, MISSING), source, ())

    def _bind_names(
        self, names: Mapping[str, int], meaning: Callable[[str], Any], source: FunctionSource, bound: Iterable[str]
    ) -> None:
        for name, line in names.items():
            if name in ENGINE_NAMES or name in bound:
                continue
            if name in self.shareable:
                self.shared[name] = name
                continue
            try:
                try:
                    value = meaning(name)
                except ValueError:
                    raise source.error(f"the name {name!r} has no value yet", line) from None
                if value is not MISSING:
                    if name in self._parameters:
                        raise source.error(
                            f"{name!r} names a parameter of the block that the engine binds, and another value in "
                            f"{source.name}(): pass that value to {source.name}() as an argument",
                            line,
                        )
                    self.bind(name, value, source, line)
                elif not self._is_known(name):
                    self.bind_absent(name, source, line)
            except TraceRejected:
                if not self.is_dead(name, source, meaning):
                    raise

    def is_dead(self, name: str, source: FunctionSource, meaning: Callable[[str], Any]) -> bool:
        """Whether `source` uses `name` only in code that never runs, as under a condition that is known to be false."""
        return is_dead(name, source, lambda one: self._meanings[one][0] if one in self._meanings else meaning(one))

    def _is_known(self, name: str) -> bool:
        """Whether the engine binds a name that has no value here: a variable, a parameter or a builtin."""
        return name in self._bound or name in self._parameters or hasattr(builtins, name)

    def bind_absent(self, name: str, source: FunctionSource, line: int) -> None:
        """Bind a name without a value here: to a shared value of the trace, or by an `import` that did not run here.

        Raises:
            BlockError: neither exists.
        """
        if name in self.shareable:
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
        from difflib import get_close_matches

        near = get_close_matches(name, sorted(one for one in candidates if not one.startswith("_tw_")), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise source.error(
            f"the name {name!r} is not defined: it is neither a variable of the block nor a name in the closure or the "
            f"module of {source.name}(){hint} (import modules that only the engine has in the body)",
            line,
        )

    # --- values -------------------------------------------------------------------------------------------------------

    def bind(self, name: str, value: Any, source: FunctionSource, line: int) -> None:
        """Bind `name`, used at `line` of `source`, to `value`.

        Raises:
            BlockError: the name has another value elsewhere in the block, or the source of the value cannot travel.
            UntransportableVariable: the value cannot travel.
        """
        if name in self._meanings:
            before, where = self._meanings[name]
            if not self._same(name, before, value):
                raise source.error(
                    f"the name {name!r} means {brief(value)} in {source.name}() and {brief(before)} in "
                    f"{where.name}(), and a block and its functions share one namespace: rename one of them",
                    line,
                )
            if name in self._own_modules:
                if isinstance(value, types.ModuleType) or _is_only_read(name, value, source):
                    self._bind_used(name, value, source)
                else:
                    del self._own_modules[name]
                    self._bind_value(name, value, source, line)
            return
        self._meanings[name] = (value, source)
        if type(value) in _SCALARS:
            self._bind_value(name, value, source, line)
            return
        marks = self._marks()
        try:
            self._bind_thing(name, value, source, line)
        except TraceRejected:
            self._forget(marks)
            del self._meanings[name]
            raise

    def _bind_thing(self, name: str, value: Any, source: FunctionSource, line: int) -> None:
        if (path := module_path(value)) is not None:
            self.paths[name] = path
        elif isinstance(value, types.ModuleType):
            self._bind_module(name, value, source, line)
        elif isinstance(value, BlockFunction):
            spelled = self.spelled(name)
            reason = f"{spelled!r} is an intervention, and a block cannot call another"
            raise self.untransportable(spelled, reason, source, line)
        elif (importable := _importable(name, value, source)) is not None:
            self.imports[name] = importable
        elif isinstance(value, types.FunctionType):
            self._bind_function(name, value, source, line)
        elif isinstance(value, type):
            self._bind_class(name, value, source, line)
        elif self.is_own_class(type(value)) and _is_only_read(name, value, source):
            self._bind_used(name, value, source)
        else:
            self._bind_value(name, value, source, line)

    def bind_hidden(self, hidden: str, value: Any, spelled: str, source: FunctionSource, line: int) -> None:
        """Bind a part of a value to a generated name. `spelled` is the expression for the part, for errors."""
        self._written_as[hidden] = spelled
        self.bind(hidden, value, source, line)

    def travels_by_name(self, value: Any, source: FunctionSource) -> bool:
        """Whether a value travels by name or as source, not by value: a module, a class or a function."""
        kinds = type | types.FunctionType | types.ModuleType | BlockFunction
        return isinstance(value, kinds) or module_path(value) is not None or _importable("", value, source) is not None

    def is_own_class(self, cls: type) -> bool:
        """Whether a class belongs to the caller and to no installed package, so that an engine cannot import it."""
        return not _is_installed(str(cls.__module__))

    def spelled(self, name: str) -> str:
        """The expression in the caller's source for the value that is bound to `name`."""
        return self._written_as.get(name, name)

    def parts_of(self, name: str) -> str:
        """The name of the list of plain data from which the engine builds the object `name`."""
        return f"{name}_parts" if name.startswith("_tw_") else f"_tw_{name}_parts"

    def add_parts(self, name: str, parts: list[bytes]) -> None:
        """Send packed plain data from which the engine builds the object `name`."""
        if parts:
            self._values[self.parts_of(name)] = struct.pack(">BI", 0xDD, len(parts)) + b"".join(parts)

    @cached_property
    def objects(self) -> Objects:
        """Builds values that are not plain data."""
        from .objects import Objects

        return Objects(self)

    def _growing(self) -> tuple[dict[str, Any], ...]:
        return (self.modules, self.imports, self.paths, self.shared, self._values, self._own_modules, self._meanings)

    def _marks(self) -> tuple[int, ...]:
        objects = self.__dict__.get("objects")
        return (*map(len, self._growing()), len(self.helpers), 0 if objects is None else len(objects))

    def _forget(self, marks: tuple[int, ...]) -> None:
        """Undo all bindings since `marks`, which were made for a value that cannot travel."""
        for held, count in zip(self._growing(), marks, strict=False):
            while len(held) > count:
                held.popitem()
        del self.helpers[marks[-2] :]
        if "objects" in self.__dict__:
            self.objects.forget(marks[-1])

    def _same(self, name: str, before: Any, value: Any) -> bool:
        if before is value:
            return True
        return name in self._values and type(before) is type(value) and _packs_as(value, self._values[name])

    def _bind_module(self, name: str, module: types.ModuleType, source: FunctionSource, line: int) -> None:
        path = module.__name__
        if path == "__main__":
            raise self.untransportable(name, f"{name!r} is the program's own module __main__", source, line)
        if not _is_installed(path):
            self._bind_used(name, module, source)
            return
        self.modules[name] = path
        for use in source.uses(name):
            self._import_below(path, use.chain)

    def _import_below(self, path: str, chain: tuple[str, ...]) -> None:
        """Import the submodules that the body reaches through `path`: `import xml.dom` binds the name xml alone."""
        for step in chain:
            path = f"{path}.{step}"
            if not isinstance(sys.modules.get(path), types.ModuleType):
                break
            self.modules["_tw_" + path.replace(".", "_")] = path

    def _bind_used(self, name: str, owner: Any, source: FunctionSource) -> None:
        """Bind the attributes that `source` uses of the caller's own module, or of an object.

        Raises:
            BlockError: an attribute does not exist, or the source changes it.
            UntransportableVariable: an attribute cannot travel, or the source uses the module itself.
        """
        known = self._own_modules.setdefault(name, {})
        for use in source.uses(name):
            value, taken = owner, known
            for depth, step in enumerate(use.chain, 1):
                spelled = ".".join((name, *use.chain[:depth]))
                if use.changed and depth == len(use.chain):
                    raise _changed(spelled, owner, use, source)
                try:
                    value = getattr(value, step)
                except AttributeError as error:
                    raise source.error(f"{spelled!r} is not defined: {error}", use.line) from None
                if isinstance(value, types.ModuleType) and not _is_installed(value.__name__):
                    taken = taken.setdefault(step, {})
                    continue
                hidden = f"_tw_{spelled.replace('.', '__')}"
                self.bind_hidden(hidden, value, spelled, source, use.line)
                if isinstance(value, types.ModuleType):
                    self._import_below(value.__name__, use.chain[depth:])
                taken[step] = hidden
                break
            else:
                spelled = ".".join((name, *use.chain))
                reason = (
                    f"{spelled!r} is a module of your own, of which only attributes can travel: "
                    f"write {spelled}.NAME, or import NAME from it"
                )
                raise self.untransportable(spelled, reason, source, use.line)

    def _bind_function(self, name: str, function: types.FunctionType, source: FunctionSource, line: int) -> None:
        if hasattr(function, "__wrapped__"):
            raise source.error(
                f"{self._written_as.get(name, name)}() is decorated, and decorators do not travel: call a function "
                "without any, and move the decorator's code into its body",
                line,
            )
        definition = find(function)
        _ = definition.checked_helper
        replaced: dict[ast.expr, str] = {}
        values = defaults_of(function)
        for parameter, expression in definition.default_names().items():
            if isinstance(expression, ast.Constant):
                continue
            # The value travels, since the expression may evaluate to another value on the engine.
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

    def _bind_class(self, name: str, cls: type, source: FunctionSource, line: int) -> None:
        known = self.objects.name_of(cls)
        if known not in (None, name):
            helper = Helper(name=name, source=f"{name} = {known}\n", filename=f"<{self.spelled(name)}>", first_line=1)
            self.helpers.append(helper)
            return
        self.objects.know(cls, name)
        try:
            definition = find_class(cls)
        except BlockError as problem:
            if self.objects.bind_made(name, cls, source, line):
                return
            spelled = self.spelled(name)
            reason = f"{spelled!r} is a class of your own, {type_name(cls)}: {problem.message}"
            raise self.untransportable(spelled, reason, source, line) from None
        _ = definition.checked_class
        self._names_of_class(cls, definition, definition.eager_names)
        self.helpers.append(
            Helper(
                name=name,
                source=definition.text(name),
                filename=definition.filename,
                first_line=definition.first_line,
            )
        )
        self._names_of_class(cls, definition, definition.late_names)

    def _bind_value(self, name: str, value: Any, source: FunctionSource, line: int) -> None:
        from tracewire_bus.wire.kinds import Unsavable
        from tracewire_bus.wire.packing import pack
        from tracewire_bus.wire.refs import ArrayRef

        spelled = self.spelled(name)
        if isinstance(value, ArrayRef):
            reason = f"{spelled!r} is {value!r} of another trace: pass the array that its load() returns"
            raise self.untransportable(spelled, reason, source, line)
        if type(value) not in _SCALARS and not _is_plain(value):
            self._bind_object(name, value, source, line)
            return
        try:
            self._values[name] = pack(value)
        except Unsavable as error:
            # `UntransportableVariable` adds the list of types that can travel, so it is cut off here.
            reason = f"{spelled!r} is of type {type_name(type(value))}: {str(error).partition('; what can: None')[0]}"
            raise self.untransportable(spelled, reason, source, line) from None

    def _bind_object(self, name: str, value: Any, source: FunctionSource, line: int) -> None:
        marks = self._marks()
        try:
            self.objects.bind(name, value, source, line)
        except UntransportableVariable:
            if not _is_only_read(name, value, source):
                raise
            self._forget(marks)
            self._bind_used(name, value, source)

    def untransportable(self, name: str, reason: str, source: FunctionSource, line: int) -> UntransportableVariable:
        return UntransportableVariable(name, reason, filename=source.filename, line=line)


def _changed(spelled: str, owner: Any, use: Use, source: FunctionSource) -> BlockError:
    if isinstance(owner, types.ModuleType):
        return source.error(
            f"a block cannot change {spelled!r}: the engine has a copy of your module's attributes", use.line
        )
    own = spelled.rpartition(".")[2]
    return source.error(
        f"a block cannot change {spelled!r}: the engine has a copy of {spelled.partition('.')[0]!r}. Bind a name "
        f"of the block instead, as in `{own} = ...save()`, and read it from the trace's saves",
        use.line,
    )


def _is_plain(value: Any) -> bool:
    from .objects import is_plain

    return is_plain(value)


def _packs_as(value: Any, packed: bytes) -> bool:
    from tracewire_bus.wire.kinds import Unsavable
    from tracewire_bus.wire.packing import pack

    try:
        return pack(value) == packed
    except Unsavable:
        return False


def _own_module_namespace(name: str, used: Mapping[str, Any]) -> Helper:
    """Source for the engine's copy of the caller's own module: a namespace of the used attributes."""

    def spelled(used: Mapping[str, Any]) -> str:
        items = (f"{key}={value if isinstance(value, str) else spelled(value)}" for key, value in sorted(used.items()))
        return f"__import__('types').SimpleNamespace({', '.join(items)})"

    return Helper(name=name, source=f"{name} = {spelled(used)}", filename=f"<module {name}>", first_line=1)


def module_path(value: Any) -> str | None:
    """The path in the model of a handle, a module tree or one of its nodes; None for other values."""
    from tracewire_bus.domain.tree import ModuleNode, ModuleTree

    if isinstance(value, ModuleNode):
        return value.path
    return "" if isinstance(value, ModelHandle | ModuleTree) else None


def defaults_of(function: types.FunctionType) -> dict[str, Any]:
    """The evaluated default values of a function, by parameter."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }


def _importable(name: str, value: Any, source: FunctionSource) -> tuple[str, str] | None:
    """Module and attribute by which an engine can import `value` from an installed package; None if it cannot."""
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    candidates: list[tuple[Any, Any]] = []
    if isinstance(value, type) or callable(value):
        candidates.append((module, qualified))
        # Functions of extension modules often lack a `__module__`, so import statements of the file are tried, too.
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
    """Whether a module belongs to Python or to an installed package, which an engine is expected to have."""
    root = module.partition(".")[0]
    if root == "__main__":
        return False
    if root in sys.stdlib_module_names or root in ENGINE_MODULES:
        return True
    path = getattr(sys.modules.get(module), "__file__", None) or getattr(sys.modules.get(root), "__file__", None)
    return path is not None and any(
        part in ("site-packages", "dist-packages") for part in path.replace("\\", "/").split("/")
    )


def _is_only_read(name: str, value: Any, source: FunctionSource) -> bool:
    """Whether `source` only reads attributes of an object, and none of them is a method."""
    if not _is_open(value):
        return False
    uses = source.uses(name)
    own = not _is_installed(str(type(value).__module__))
    return bool(uses) and all(use.chain and _is_attribute(value, use.chain[0], own) for use in uses)


def _is_open(value: Any) -> bool:
    """Whether the attributes of a value are all of its state, unlike those of a list or a number."""
    return not isinstance(value, enum.Enum | tuple | list | dict | set | frozenset | str | int | float | bytes)


def _is_attribute(value: Any, name: str, unknown: bool) -> bool:
    """Whether `name` is an attribute of an object and not a method. `unknown` is the answer for a missing attribute."""
    methods = types.FunctionType, classmethod, types.MethodDescriptorType, types.WrapperDescriptorType
    if isinstance(inspect.getattr_static(value, name, None), methods):
        return False
    # On the engine, nnsight gives every object a method `save`.
    return hasattr(value, name) or (unknown and name != "save")


def brief(value: Any) -> str:
    """A short text for a value: shape and type of an array, name of a function, module or class, else its `repr`."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return f"{type_name(type(value))}{list(shape)}"
    if isinstance(value, types.FunctionType | types.ModuleType | type):
        return f"{type(value).__name__} {value.__name__}"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
