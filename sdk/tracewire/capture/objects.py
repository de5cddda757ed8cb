"""Objects: generates the Python source that builds a value on the engine that is not plain data.

A block's variables are plain data and arrays (`tracewire_bus.wire.packing`). Other values are taken apart here. Their
plain parts travel as data. A *helper* of the block, a few generated lines of source, builds the value again from that
data and from classes, functions and modules. These travel as they do when a block names them: the caller's own as
source, those of an installed package by name, and modules of the served model by path. So a value can do nothing on an
engine that the block's own source could not do, and nothing is pickled.

The generated source has no data except names of attributes. So submissions with different values have the same source,
which the engine compiles once.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import functools
import pathlib
import re
import sys
import types
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

from tracewire.checks import type_name
from tracewire.errors import TraceRejected, UntransportableVariable
from tracewire_bus.wire.kinds import MAX_DEPTH, Unsavable, kind_or_none
from tracewire_bus.wire.messages import Helper
from tracewire_bus.wire.packing import pack

if TYPE_CHECKING:
    from .source import FunctionSource

__all__ = ["Objects", "is_module", "is_plain"]

_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})
_SCALAR_KINDS = frozenset({"int", "float", "complex", "str", "bytes"})
_CONTAINERS = (list, tuple, set, frozenset)

#: Types whose values a call builds: module and name of the callable, and a function from a value to the arguments.
_BY_CALL: dict[type, tuple[str, str, Any]] = {
    range: ("builtins", "range", lambda value: (value.start, value.stop, value.step)),
    slice: ("builtins", "slice", lambda value: (value.start, value.stop, value.step)),
    re.Pattern: ("re", "compile", lambda value: (value.pattern, value.flags)),
    pathlib.PosixPath: ("pathlib", "Path", lambda value: (str(value),)),
    pathlib.WindowsPath: ("pathlib", "PureWindowsPath", lambda value: (str(value),)),
    collections.deque: ("collections", "deque", lambda value: (list(value), value.maxlen)),
    collections.OrderedDict: ("collections", "OrderedDict", lambda value: (dict(value),)),
    collections.Counter: ("collections", "Counter", lambda value: (dict(value),)),
    collections.defaultdict: ("collections", "defaultdict", lambda value: (value.default_factory, dict(value))),
    functools.partial: ("functools", "partial", lambda value: (value.func, *value.args)),
    types.SimpleNamespace: ("types", "SimpleNamespace", lambda value: ()),
    argparse.Namespace: ("argparse", "Namespace", lambda value: ()),
    type(...): ("builtins", "Ellipsis", None),
}
_BY_TORCH: dict[str, Any] = {"device": lambda value: (str(value),), "Size": lambda value: (list(value),)}


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether a value consists of builtin types and arrays only, so that packing keeps its types.

    A value that nests too deep counts as plain, since packing refuses it.
    """
    cls = type(value)
    if cls in _SCALARS or depth > MAX_DEPTH:
        return True
    if cls is dict:
        return is_plain(list(value), depth + 1) and is_plain(list(value.values()), depth + 1)
    if cls in _CONTAINERS:
        rest = set(map(type, value)) - _SCALARS
        return not rest or all(is_plain(item, depth + 1) for item in value if type(item) in rest)
    found = kind_or_none(value)
    return found in ("array", "dtype") or (found in _SCALAR_KINDS and not isinstance(value, enum.Enum))


def is_module(value: Any) -> bool:
    """Whether a value is a `torch.nn.Module`."""
    torch = sys.modules.get("torch")
    nn = getattr(torch, "nn", None)
    return nn is not None and isinstance(value, nn.Module)


class Names(Protocol):
    """The part of a `Capture` that `Objects` uses."""

    helpers: list[Helper]
    modules: dict[str, str]

    def bind_hidden(self, hidden: str, value: Any, spelled: str, source: FunctionSource, line: int) -> None:
        """See `Capture.bind_hidden`."""

    def travels_by_name(self, value: Any, source: FunctionSource) -> bool:
        """See `Capture.travels_by_name`."""

    def is_own_class(self, cls: type) -> bool:
        """See `Capture.is_own_class`."""

    def spelled(self, name: str) -> str:
        """See `Capture.spelled`."""

    def parts_of(self, name: str) -> str:
        """See `Capture.parts_of`."""

    def add_parts(self, name: str, parts: list[bytes]) -> None:
        """See `Capture.add_parts`."""

    def untransportable(self, name: str, reason: str, source: FunctionSource, line: int) -> UntransportableVariable:
        """The error for a variable that cannot travel."""


class Objects:
    """The objects of one block. The engine builds each of them once."""

    def __init__(self, capture: Names) -> None:
        self._capture = capture
        #: By `id`, the name and the object of each known object. The reference keeps the id valid.
        self._known: dict[int, tuple[str, Any]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._known)

    def forget(self, count: int) -> None:
        """Forget all objects but the first `count`."""
        while len(self._known) > count:
            self._known.popitem()

    def bind(self, name: str, value: Any, source: FunctionSource, line: int) -> None:
        """Add a helper to the block that builds `value` and binds `name` to it.

        Raises:
            UntransportableVariable: a part of the value cannot travel; the error names the part and the reason.
        """
        builder = _Builder(self, self._capture, name, source, line)
        expression = builder.expression(value, builder.spelled, 0)
        text = "".join(f"{statement}\n" for statement in (*builder.statements, f"{name} = {expression}"))
        helper = Helper(name=name, source=text, filename=f"<{builder.spelled}>", first_line=1)
        self._capture.add_parts(name, builder.parts)
        self._capture.helpers.append(helper)

    def bind_made(self, name: str, cls: type, source: FunctionSource, line: int) -> bool:
        """Add a helper that makes a class without a class statement: a namedtuple, or an enumeration made by a call.

        Returns False if the class is neither.
        """
        builder = _Builder(self, self._capture, name, source, line)
        expression = builder.made_class(cls)
        if expression is None:
            return False
        helper = Helper(name=name, source=f"{name} = {expression}\n", filename=f"<{builder.spelled}>", first_line=1)
        self._capture.add_parts(name, builder.parts)
        self._capture.helpers.append(helper)
        return True

    def know(self, value: Any, name: str) -> None:
        """Note the engine's name for an object that is bound to a name of the block."""
        self._known[id(value)] = name, value

    def name_of(self, value: Any) -> str | None:
        """The engine's name for a known object; None for others."""
        return known[0] if (known := self._known.get(id(value))) is not None else None

    def named(self, value: Any) -> str:
        """Give an object a new generated name."""
        self._count += 1
        name = f"_tw_{self._count}"
        self._known[id(value)] = name, value
        return name


class _Builder:
    """Generates the statements of one helper. `name`, `source` and `line` say where the block uses the value."""

    def __init__(self, objects: Objects, capture: Names, name: str, source: FunctionSource, line: int) -> None:
        self._objects = objects
        self._capture = capture
        self._name = name
        self._source = source
        self._line = line
        self.spelled = capture.spelled(name)
        self.statements: list[str] = []
        #: The packed plain parts, by the index that the helper uses.
        self.parts: list[bytes] = []

    def refuse(self, where: str, value: Any, reason: str = "") -> UntransportableVariable:
        """The error for the part at `where`, an expression such as `config.layer`, that cannot travel."""
        text = f"{where!r} is of type {type_name(type(value))}"
        return self._capture.untransportable(
            self.spelled, f"{text}: {reason}" if reason else f"{text}, which cannot travel", self._source, self._line
        )

    def _part(self, value: Any, where: str) -> str:
        try:
            self.parts.append(pack(value))
        except Unsavable as error:
            raise self.refuse(where, value, str(error).partition("; what can: None")[0]) from None
        return f"{self._capture.parts_of(self._name)}[{len(self.parts) - 1}]"

    def _named(self, value: Any, where: str) -> str:
        """The engine's name for a module, class or function."""
        name = self._objects.name_of(value)
        if name is None:
            count = len(self._objects)
            name = self._objects.named(value)
            try:
                self._capture.bind_hidden(name, value, where, self._source, self._line)
            except TraceRejected as error:
                self._objects.forget(count)
                if isinstance(error, UntransportableVariable):
                    raise self._capture.untransportable(self.spelled, error.reason, self._source, self._line) from None
                raise
        return name

    def _imported(self, module: str, name: str) -> str:
        hidden = f"_tw_{module}"
        self._capture.modules[hidden] = module
        return f"{hidden}.{name}"

    # --- expressions --------------------------------------------------------------------------------------------------

    def expression(self, value: Any, where: str, depth: int) -> str:
        """An expression that builds `value`. `where` is the part's place in the caller's value, for errors.

        Raises:
            UntransportableVariable: the value cannot travel.
        """
        if depth > MAX_DEPTH:
            raise self.refuse(self.spelled, value, f"containers nest deeper than {MAX_DEPTH} or refer to themselves")
        cls = type(value)
        if is_plain(value):
            return self._part(value, where)
        if (known := self._objects.name_of(value)) is not None:
            return known
        if cls is dict:
            return self._dict(value, where, depth)
        if cls in _CONTAINERS:
            return self._container(value, where, depth)
        if cls in _BY_CALL:
            return self._call(*_BY_CALL[cls], value, where, depth)
        if self._capture.travels_by_name(value, self._source):
            return self._named(value, where)
        if cls.__module__ == "torch" and (arguments := _BY_TORCH.get(cls.__qualname__)) is not None:
            return self._call("torch", cls.__qualname__, arguments, value, where, depth)
        if isinstance(value, types.MethodType):
            owner = self.expression(value.__self__, f"{where}.__self__", depth + 1)
            return f"{owner}.{value.__name__}"
        if isinstance(value, enum.Enum):
            return self._member(value, where)
        if isinstance(value, tuple) and hasattr(cls, "_fields"):
            return self._namedtuple(value, where, depth)
        if is_module(value):
            return self._module(value, where, depth)
        # An instance of a subclass of a builtin container travels as that container.
        if isinstance(value, dict):
            return self._dict(dict(value), where, depth)
        for base in _CONTAINERS:
            if isinstance(value, base):
                return self._container(base(value), where, depth)
        return self._object(value, where, depth)

    def _dict(self, value: dict[Any, Any], where: str, depth: int) -> str:
        items = []
        for simple, group in groupby(value.items(), key=lambda item: is_plain(item[0]) and is_plain(item[1])):
            pairs = list(group)
            if simple:
                items.append(f"**{self._part(dict(pairs), where)}")
                continue
            for key, item in pairs:
                made = self.expression(key, f"a key of {where}", depth + 1)
                items.append(f"{made}: {self.expression(item, f'{where}[{_short(key)}]', depth + 1)}")
        return "{" + ", ".join(items) + "}"

    def _container(self, value: Any, where: str, depth: int) -> str:
        items = []
        ordered = isinstance(value, list | tuple)
        numbered: Iterable[tuple[int, Any]] = enumerate(value)
        if not ordered:
            # Plain items first, to pack them together.
            numbered = enumerate(sorted(value, key=lambda item: (not is_plain(item), repr(item))))
        for simple, group in groupby(numbered, key=lambda item: is_plain(item[1])):
            pairs = list(group)
            if simple:
                items.append(f"*{self._part([item for _, item in pairs], where)}")
                continue
            items += [
                self.expression(item, f"{where}[{index}]" if ordered else f"an item of {where}", depth + 1)
                for index, item in pairs
            ]
        inner = ", ".join(items)
        match value:
            case list():
                return f"[{inner}]"
            case tuple():
                return f"({inner},)"
            case set():
                return f"{{{inner}}}"
        return f"{self._imported('builtins', 'frozenset')}({{{inner}}})"

    def _call(self, module: str, name: str, arguments: Any, value: Any, where: str, depth: int) -> str:
        function = self._imported(module, name)
        if arguments is None:
            return function
        given = [f"*{self._container(tuple(arguments(value)), where, depth)}" if arguments(value) else ""]
        keywords = vars(value) if isinstance(value, types.SimpleNamespace | argparse.Namespace) else {}
        if isinstance(value, functools.partial):
            keywords = value.keywords
        if keywords:
            given.append(f"**{self._dict(keywords, where, depth)}")
        return f"{function}({', '.join(filter(None, given))})"

    def _member(self, value: enum.Enum, where: str) -> str:
        try:
            made = self._class(type(value), where)
        except TraceRejected:
            if kind_or_none(value) is None:
                raise
            # A member of an IntEnum whose class cannot travel travels as its number.
            return self._part(value, where)
        if value._name_ in type(value).__members__:
            return f"{made}[{self._part(value._name_, where)}]"
        return f"{made}({self._part(value._value_, where)})"

    def _namedtuple(self, value: Any, where: str, depth: int) -> str:
        try:
            made = self._class(type(value), where)
        except TraceRejected:
            return self._container(tuple(value), where, depth)
        new = f"{self._imported('builtins', 'tuple')}.__new__"
        return f"{new}({made}, {self._container(list(value), where, depth)})"

    def _class(self, cls: type, where: str) -> str:
        return self._named(cls, f"type({where})")

    def made_class(self, cls: Any) -> str | None:
        """An expression for a namedtuple class, or for an enumeration made by a call; None for other classes."""
        where = self.spelled
        if issubclass(cls, tuple) and cls.__bases__ == (tuple,) and hasattr(cls, "_fields"):
            defaults = self._container(list(cls._field_defaults.values()), where, 0)
            fields = self._part([cls.__name__, list(cls._fields)], where)
            return f"{self._imported('collections', 'namedtuple')}(*{fields}, defaults={defaults}, rename=True)"
        if issubclass(cls, enum.Enum) and not any(self._capture.is_own_class(base) for base in cls.__bases__):
            members = self._dict({name: one._value_ for name, one in cls.__members__.items()}, where, 0)
            base = self._named(cls.__bases__[-1], where)
            return f"{base}({self._part(cls.__name__, where)}, {members})"
        return None

    # --- objects with a state -----------------------------------------------------------------------------------------

    def _begin(self, value: Any, made: str) -> str:
        """Name an object before its parts are built, since they may refer to it. `made` is its expression."""
        name = self._objects.named(value)
        self.statements.append(f"{name} = {made}")
        return name

    def _object(self, value: Any, where: str, depth: int) -> str:
        """An instance of the caller's own class or of an installed dataclass, built from its class and attributes."""
        cls = type(value)
        if not (self._capture.is_own_class(cls) or dataclasses.is_dataclass(cls)):
            raise self.refuse(where, value, _hint(value))
        try:
            # The engine does the same, without the constructor, whose arguments are not known.
            object.__new__(cls)
        except TypeError as error:
            raise self.refuse(where, value, f"it cannot be built from its attributes ({error})") from None
        base = self._imported("builtins", "object")
        name = self._begin(value, f"{base}.__new__({self._class(cls, where)})")
        plain, others = _split(_state(value))
        if plain:
            part = self._part(plain, where)
            self.statements.append(f"for _tw_key, _tw_value in {part}.items():")
            self.statements.append(f"    {base}.__setattr__({name}, _tw_key, _tw_value)")
        for key, item in others.items():
            made = self.expression(item, f"{where}.{key}", depth + 1)
            self.statements.append(f"{base}.__setattr__({name}, {key!r}, {made})")
        return name

    def _module(self, module: Any, where: str, depth: int) -> str:
        """A `torch.nn.Module`, built from its class, weights, buffers, children and other attributes."""
        if any(type(one).__name__.startswith("Uninitialized") for one in module._parameters.values()):
            raise self.refuse(where, module, "its weights have no shape yet: call it once before")
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            if getattr(module, hooks, None):
                reason = "it has hooks, which do not travel: remove them, or call their functions in the block"
                raise self.refuse(where, module, reason)
        torch = sys.modules["torch"]
        base = self._imported("torch", "nn.Module")
        cls = self._class(type(module), where)
        name = self._begin(module, f"{cls}.__new__({cls})")
        self.statements.append(f"{base}.__init__({name})")
        # The constructor of the base class makes the attributes that every module has.
        fresh = {*vars(torch.nn.Module()), "_parameters", "_buffers", "_modules"}
        plain, others = _split({key: item for key, item in vars(module).items() if key not in fresh})
        if plain:
            self.statements.append(f"{name}.__dict__.update({self._part(plain, where)})")
        for key, item in others.items():
            made = self.expression(item, f"{where}.{key}", depth + 1)
            self.statements.append(f"{name}.__dict__[{key!r}] = {made}")
        for key, parameter in module._parameters.items():
            made = "None" if parameter is None else self._parameter(parameter, f"{where}.{key}")
            self.statements.append(f"{name}._parameters[{key!r}] = {made}")
        for key, buffer in module._buffers.items():
            made = "None" if buffer is None else self._tensor(buffer, f"{where}.{key}")
            self.statements.append(f"{name}._buffers[{key!r}] = {made}")
        for key, child in module._modules.items():
            made = "None" if child is None else self.expression(child, f"{where}.{key}", depth + 1)
            self.statements.append(f"{name}._modules[{key!r}] = {made}")
        self.statements.append(f"{name}.training = False")
        return name

    def _parameter(self, parameter: Any, where: str) -> str:
        """A parameter, which several modules may share."""
        known = self._objects.name_of(parameter)
        if known is None:
            made = f"{self._imported('torch', 'nn.Parameter')}({self._tensor(parameter, where)}, requires_grad=False)"
            known = self._begin(parameter, made)
        return known

    def _tensor(self, tensor: Any, where: str) -> str:
        known = self._objects.name_of(tensor)
        if known is None:
            known = self._begin(tensor, self._part(tensor, where))
        return known


def _short(key: Any) -> str:
    text = repr(key)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _split(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plain attributes, and the others."""
    plain = {key: item for key, item in state.items() if is_plain(item)}
    return plain, {key: item for key, item in state.items() if key not in plain}


def _state(value: Any) -> dict[str, Any]:
    """An object's attributes, from its `__dict__` and its slots."""
    state = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for slot in [slots] if isinstance(slots, str) else slots:
            if slot in ("__dict__", "__weakref__"):
                continue
            private = slot.startswith("__") and not slot.endswith("__") and cls.__name__.strip("_")
            attribute = f"_{cls.__name__.lstrip('_')}{slot}" if private else slot
            if hasattr(value, attribute):
                state[attribute] = getattr(value, attribute)
    return state


def _hint(value: Any) -> str:
    """Advice for an object that cannot travel."""
    if all(hasattr(type(value), name) for name in ("encode", "decode", "convert_tokens_to_ids")):
        return "the block has the engine's own tokenizer, as model.tokenizer"
    return "bind the attributes that the block uses to names before the block, as in `layer = config.layer`"
