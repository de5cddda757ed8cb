"""What expressions of a block stand for, while `known_edits.py` goes through its source."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tracewire_engine.protocol.known_edits import Edit, Operation

__all__ = [
    "IN_PLACE",
    "ON_NUMBERS",
    "OPERATORS",
    "OTHER",
    "OWN",
    "PARTS",
    "STEP",
    "SURE",
    "SURE_OTHERS",
    "UNBOUND",
    "Constant",
    "Dtype",
    "Growing",
    "Leaf",
    "Module",
    "Name",
    "Number",
    "Numbers",
    "Other",
    "Register",
    "Stream",
    "Unclear",
    "encoded",
    "is_known",
]

#: How many operations an edit may have.
_MOST_OPERATIONS = 1024

#: Operators, by the names of operations. The operation of `+=` has an `i` before the name.
OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "truediv",
    ast.MatMult: "matmul",
}
ON_NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv")
}

#: Methods that raise no error on any tensor without arguments, and those of which nothing else is known.
SURE = frozenset(
    {"abs", "bfloat16", "clone", "contiguous", "detach", "double", "exp", "float", "half", "neg", "norm", "relu"}
    | {"rsqrt", "sigmoid", "sign", "sqrt", "square", "sum", "tanh"}
)
SURE_OTHERS = frozenset({"cpu", "tolist"})

#: Methods that change a tensor in place.
IN_PLACE = frozenset({"add_", "clamp_", "copy_", "div_", "fill_", "mul_", "neg_", "relu_", "sub_", "zero_"})

#: Operations whose result may be their first argument, or a part of it: in the first line it is.
PARTS = frozenset({"getitem", "setitem"}) | IN_PLACE | {f"i{name}" for name in OPERATORS.values()}
_PERHAPS_PARTS = frozenset(
    {"bfloat16", "contiguous", "detach", "double", "float", "half", "to", "type_as", "unsqueeze"}
)


class Unclear(Exception):
    """The block may change the model in a way that is not known."""


class Other:
    """A value of which nothing is known. If it is `own`, the block has made it, and it is no value of the model."""

    def __init__(self, *, own: bool = False) -> None:
        self.own = own


OTHER, OWN = Other(), Other(own=True)


#: What a name stands for that may stand for nothing; and the number of a step.
UNBOUND, STEP = Other(), Other(own=True)


@dataclass(frozen=True)
class Number:
    """A number of Python's."""

    value: bool | int | float


@dataclass(frozen=True)
class Numbers:
    """A list of numbers."""

    values: tuple[int, ...]


@dataclass(frozen=True)
class Module:
    """A module of the model, by its path."""

    path: str


@dataclass(frozen=True)
class Stream:
    """`model.residual(...)` of a layer, by the layer's path."""

    path: str


@dataclass(frozen=True)
class Name:
    """The tracer, the live values, or a module of Python."""

    what: str


@dataclass(frozen=True)
class Dtype:
    """A dtype of torch."""

    name: str


@dataclass(frozen=True)
class Leaf:
    """A variable of the block, or an item of one."""

    name: str
    keys: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class Constant:
    """An operation on leaves and numbers alone."""

    name: str
    arguments: list[Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class Register:
    """What an operation of a location's edit makes. `visit` says on which of the block's visits it was made."""

    edit: Growing
    number: int
    visit: int


@dataclass(eq=False)
class Growing:
    """The edit of a location, as far as the source was gone through."""

    location: str
    first: int
    end: int | None
    operations: list[Operation] = field(default_factory=list)
    effects: list[int] = field(default_factory=list)
    leaves: list[list[Any]] = field(default_factory=list)
    constants: dict[Constant, int] = field(default_factory=dict)
    #: Operations that may raise an error; and how many of those there are that the last effect comes behind.
    risky: set[int] = field(default_factory=set)

    def emit(self, name: str, arguments: list[Any], options: dict[str, Any] | None = None) -> int:
        """Add an operation. Returns its register."""
        if len(self.operations) >= _MOST_OPERATIONS:
            raise Unclear
        self.operations.append(Operation(name, arguments, options or {}))
        number = len(self.operations)
        if not self._is_sure(name, arguments, options):
            self.risky.add(number)
        return number

    def _is_sure(self, name: str, arguments: list[Any], options: dict[str, Any] | None) -> bool:
        """Whether an operation raises no error, whatever the value is."""
        if name in ("attribute", "stream", "put_stream", "zero_", "relu_", "neg_"):
            return True
        if name == "getitem":
            of, row, *columns = arguments
            if of[0] != "r" or len(columns) > 1 or not all(isinstance(one, list) and one[0] == "s" for one in columns):
                return False
            return row in (0, -1, ["e"]) or (isinstance(row, list) and row[0] == "s" and row[3] in (None, 1))
        if name in SURE and len(arguments) == 1 and not options:
            return True
        plain = all(isinstance(one, bool | int | float) for one in arguments[1:])
        return plain and name.removeprefix("i") in ("add", "sub", "mul", "truediv", "fill_")

    def root(self, number: int) -> int:
        """The register whose memory a register's value shares.

        Raises:
            Unclear: that depends on the value.
        """
        while number:
            name, given = self.operations[number - 1].name, self.operations[number - 1].arguments
            if name in _PERHAPS_PARTS:
                raise Unclear
            if name not in PARTS:
                break
            number = given[0][1]
        return number

    def is_constant(self, number: int) -> bool:
        """Whether a register's value has nothing of the model's but its form."""
        if not number:
            return False
        operation = self.operations[number - 1]
        return operation.name == "attribute" or all(map(self.is_constant, _registers(operation)))

    def done(self) -> Edit:
        """The edit, with the operations that matter alone.

        Raises:
            Unclear: another operation may raise an error.
        """
        needed: set[int] = set()
        waiting = list(self.effects)
        while waiting:
            one = waiting.pop()
            if one and one not in needed:
                needed.add(one)
                waiting += _registers(self.operations[one - 1])
        if any(one not in needed for one in self.risky):
            raise Unclear
        numbers = {old: new for new, old in enumerate(sorted(needed), 1)} | {0: 0}
        kept = [_renumbered(self.operations[one - 1], numbers) for one in sorted(needed)]
        return Edit(self.location, kept, self.leaves, self.first, self.end)


def _registers(operation: Operation) -> list[int]:
    given = [*operation.arguments, *operation.options.values()]
    return [one[1] for one in given if isinstance(one, list) and one[0] == "r"]


def _renumbered(operation: Operation, numbers: Mapping[int, int]) -> Operation:
    def of(one: Any) -> Any:
        return ["r", numbers[one[1]]] if isinstance(one, list) and one[0] == "r" else one

    options = {name: of(one) for name, one in operation.options.items()}
    return Operation(operation.name, [of(one) for one in operation.arguments], options)


def is_known(argument: Any) -> bool:
    return not isinstance(argument, Other | Module | Stream | Name | Numbers)


def encoded(edit: Growing, argument: Any) -> Any:
    """An argument of an operation (see `Operation`)."""
    match argument:
        case Register():
            return ["r", argument.number]
        case Number():
            return argument.value
        case Dtype():
            return ["d", argument.name]
        case Leaf():
            leaf = [argument.name, *argument.keys]
            if leaf not in edit.leaves:
                edit.leaves.append(leaf)
            return ["v", edit.leaves.index(leaf)]
        case Constant():
            if argument not in edit.constants:
                arguments = [encoded(edit, one) for one in argument.arguments]
                options = {key: encoded(edit, one) for key, one in argument.options.items()}
                edit.constants[argument] = edit.emit(argument.name, arguments, options)
            return ["r", edit.constants[argument]]
    assert isinstance(argument, list | str)
    return argument
