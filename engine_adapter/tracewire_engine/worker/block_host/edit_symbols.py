"""What expressions of a block stand for, while `known_edits.py` goes through its source."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tracewire_engine.protocol.known_edits import LIVE_LEAF, Edit, Operation

__all__ = [
    "IN_PLACE",
    "LIST",
    "LOGITS",
    "METHODS",
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
    "is_live",
]

#: Of the locations with edits, the one whose value is a tensor for certain.
LOGITS = "model.logits"

#: How many operations an edit may have.
_MOST_OPERATIONS = 64

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

#: Methods of tensors whose result depends on nothing but the tensor and the arguments.
METHODS = SURE | {"clamp", "mean", "to", "type_as", "unsqueeze"}

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

#: What a name stands for that may stand for nothing; the number of a step; and a list of the block's own.
UNBOUND, STEP, LIST = Other(), Other(own=True), Other(own=True)


@dataclass(frozen=True)
class Number:
    """A number of Python's.

    Raises:
        Unclear: it has more than 64 bits.
    """

    value: bool | int | float

    def __post_init__(self) -> None:
        if isinstance(self.value, int) and not -(1 << 63) <= self.value < 1 << 63:
            raise Unclear


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
    """A variable of the block, or an item of one; or a live parameter, whose name is the key of `LIVE_LEAF`."""

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
    #: Numbers the operations of all edits of the block, in their order.
    clock: Iterator[int] = field(default_factory=count)
    operations: list[Operation] = field(default_factory=list)
    effects: list[int] = field(default_factory=list)
    leaves: list[list[Any]] = field(default_factory=list)
    constants: dict[Constant, int] = field(default_factory=dict)
    #: When each operation is done; those that may raise an error; and those with nothing of the model's but its form.
    times: list[int] = field(default_factory=list)
    risky: set[int] = field(default_factory=set)
    plain: set[int] = field(default_factory=set)
    #: Readings of a residual stream that the block must not change any more.
    dead: set[int] = field(default_factory=set)
    #: Operations that only check the value, and into how many items the block unpacks it.
    checks: set[int] = field(default_factory=set)
    items: int = 1

    def unpack(self, items: int) -> None:
        """Have the value unpacked into so many items. It may have more, or fewer."""
        self.checks.add(self.emit("unpack", [["r", 0], items]))
        self.items = items

    def emit(self, name: str, arguments: list[Any], options: dict[str, Any] | None = None) -> int:
        """Add an operation. Returns its register."""
        if len(self.operations) >= _MOST_OPERATIONS:
            raise Unclear
        self.operations.append(Operation(name, arguments, options or {}))
        self.times.append(next(self.clock))
        number = len(self.operations)
        if not self._is_sure(name, arguments, options):
            self.risky.add(number)
        if name == "attribute" or self.plain.issuperset(self.operations[-1].registers):
            self.plain.add(number)
        return number

    def _is_sure(self, name: str, arguments: list[Any], options: dict[str, Any] | None) -> bool:
        """Whether an operation raises no error, whatever the value is."""
        if name in ("stream", "put_stream"):
            return True
        if name == "getitem":
            return len(arguments) == 2 and self._has_item(*arguments)
        if ["r", 0] in arguments and self.location != LOGITS:
            # It may be a tuple.
            return False
        if name in SURE or name in ("attribute", "zero_", "relu_", "neg_"):
            return name == "attribute" or (len(arguments) == 1 and not options)
        if name == "to":
            return len(arguments) == 2 and not options and self._is_dtype(arguments[1])
        plain = all(type(one) in (int, float) for one in arguments[1:]) and not self._is_dtype(arguments[0])
        return plain and name.removeprefix("i") in ("add", "sub", "mul", "truediv", "fill_")

    def _is_dtype(self, argument: Any) -> bool:
        match argument:
            case ["d", _]:
                return True
            case ["r", number]:
                return bool(number > 0 and self.operations[number - 1].name == "attribute")
        return False

    def _has_item(self, of: Any, row: Any) -> bool:
        """Whether a register is sure to have an item: a row of a value of the model, or of a residual stream."""
        match of:
            case ["r", 0]:
                whole = self.location == LOGITS
            case ["r", number]:
                made = self.operations[number - 1]
                item = made.name == "getitem" and made.arguments[0] == ["r", 0] and len(made.arguments) == 2
                whole = made.name == "stream" or (item and type(made.arguments[1]) is int)
            case _:
                return False
        if not whole:
            return of == ["r", 0] and type(row) is int and 0 <= row < self.items
        return row in (0, -1, ["e"]) or (isinstance(row, list) and row[0] == "s" and row[3] in (None, 1))

    def streams(self) -> set[int]:
        """The readings of the residual stream."""
        return {number for number, one in enumerate(self.operations, 1) if one.name == "stream"}

    def is_one_way(self) -> bool:
        """Whether the block uses the residual stream alone, or the layer's output alone."""
        streams = [one for one in self.operations if one.name in ("stream", "put_stream")]
        return not streams or not any(["r", 0] in one.arguments for one in self.operations if one not in streams)

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
        return number in self.plain

    def done(self, last: int | None = None) -> Edit:
        """The edit, with the operations that matter alone.

        Args:
            last: when the block writes last (see `times`); `None` if it may write behind all.

        Raises:
            Unclear: another operation may raise an error before that.
        """
        needed: set[int] = set()
        waiting = [*self.effects, *(one for one in self.checks if last is None or self.times[one - 1] < last)]
        while waiting:
            one = waiting.pop()
            if one and one not in needed:
                needed.add(one)
                waiting += self.operations[one - 1].registers
        if any(one not in needed and (last is None or self.times[one - 1] < last) for one in self.risky):
            raise Unclear
        numbers = {old: new for new, old in enumerate(sorted(needed), 1)} | {0: 0}
        kept = [_renumbered(self.operations[one - 1], numbers) for one in sorted(needed)]
        return Edit(self.location, kept, self.leaves, self.first, self.end)


def _renumbered(operation: Operation, numbers: Mapping[int, int]) -> Operation:
    def of(one: Any) -> Any:
        return ["r", numbers[one[1]]] if isinstance(one, list) and one[0] == "r" else one

    options = {name: of(one) for name, one in operation.options.items()}
    return Operation(operation.name, [of(one) for one in operation.arguments], options)


def is_known(argument: Any) -> bool:
    """Whether an operation can take a symbol."""
    return not isinstance(argument, Other | Module | Stream | Name | Numbers)


def is_live(value: Any) -> bool:
    """Whether a symbol is a live parameter, or what was made of one: a step's own value."""
    if isinstance(value, Constant):
        return any(map(is_live, [*value.arguments, *value.options.values()]))
    return isinstance(value, Leaf) and value.name == LIVE_LEAF


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
