"""Finds what a block writes where its source shows that, so that the worker can do it without the block's host.

Most blocks that write scale a value, add a vector to it, remove a direction from it, or set it to zero, in each step or
in some. What such a block does to the value is known before it runs: a short list of torch's operations on the value,
on numbers, and on variables that came with the block (`Edit`). This module goes through the source as Python would,
with symbols in place of values. It follows what each name stands for, and goes through loops over known numbers once
for each of them.

All that it cannot follow makes a symbol of which nothing is known. If the block might change the model by such a
symbol, or where it may not come to, nothing is known of the block: the model waits for it then. It may not come to a
statement behind one that may raise an error. So all that a block does before it writes must be sure, or must be a part
of the edit, which then raises the same error.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tracewire_bus.wire.messages import Block
from tracewire_bus.wire.packing import unpack
from tracewire_engine.protocol.known_edits import Edit, Operation

from .reading import ModelPaths, is_container, is_new, literals, parsed

__all__ = ["edits_of"]

#: How many operations the edits of a block may have together.
_MOST_OPERATIONS = 1024

#: Operators, by the names of operations. The operation of `+=` has an `i` before the name.
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "truediv",
    ast.MatMult: "matmul",
}
_ON_NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv")
}

#: Methods that raise no error on any tensor without arguments, and those of which nothing else is known.
_SURE = frozenset(
    {"abs", "bfloat16", "clone", "contiguous", "detach", "double", "exp", "float", "half", "neg", "norm", "relu"}
    | {"rsqrt", "sigmoid", "sign", "sqrt", "square", "sum", "tanh"}
)
_SURE_OTHERS = frozenset({"cpu", "tolist"})

#: Methods of tensors whose result depends on nothing but the tensor and the arguments.
_METHODS = frozenset(
    {"abs", "bfloat16", "clamp", "clone", "contiguous", "detach", "double", "exp", "float", "half", "mean", "neg"}
    | {"norm", "relu", "rsqrt", "sigmoid", "sign", "sqrt", "square", "sum", "tanh", "to", "type_as", "unsqueeze"}
)

#: Methods that change a tensor in place.
_IN_PLACE = frozenset({"add_", "clamp_", "copy_", "div_", "fill_", "mul_", "neg_", "relu_", "sub_", "zero_"})

#: Methods that change a list, a dict or a set.
_FILLING = frozenset({"append", "insert", "setdefault", "update"})

#: Operations whose result may be their first argument, or a part of it: in the first line it is.
_PARTS = frozenset({"getitem", "setitem"}) | _IN_PLACE | {f"i{name}" for name in _OPERATORS.values()}
_PERHAPS_PARTS = frozenset(
    {"bfloat16", "contiguous", "detach", "double", "float", "half", "to", "type_as", "unsqueeze"}
)

_DTYPES = frozenset({"float32", "float16", "bfloat16", "float64"})

_OPTIONS = frozenset({"dim", "keepdim", "dtype", "min", "max", "alpha"})


class _Unclear(Exception):
    """The block may change the model in a way that is not known."""


class _Other:
    """A value of which nothing is known. If it is `own`, the block has made it, and it is no value of the model."""

    def __init__(self, *, own: bool = False) -> None:
        self.own = own


_OTHER, _OWN = _Other(), _Other(own=True)


#: What a name stands for that may stand for nothing; and the number of a step.
_UNBOUND, _STEP = _Other(), _Other(own=True)


@dataclass(frozen=True)
class _Number:
    """A number of Python's."""

    value: bool | int | float


@dataclass(frozen=True)
class _Numbers:
    """A list of numbers."""

    values: tuple[int, ...]


@dataclass(frozen=True)
class _Module:
    """A module of the model, by its path."""

    path: str


@dataclass(frozen=True)
class _Stream:
    """`model.residual(...)` of a layer, by the layer's path."""

    path: str


@dataclass(frozen=True)
class _Name:
    """The tracer, the live values, or a module of Python."""

    what: str


@dataclass(frozen=True)
class _Dtype:
    """A dtype of torch."""

    name: str


@dataclass(frozen=True)
class _Leaf:
    """A variable of the block, or an item of one."""

    name: str
    keys: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class _Constant:
    """An operation on leaves and numbers alone."""

    name: str
    arguments: list[Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class _Register:
    """What an operation of a location's edit makes. `visit` says on which of the block's visits it was made."""

    edit: _Growing
    number: int
    visit: int


@dataclass(eq=False)
class _Growing:
    """The edit of a location, as far as the source was gone through."""

    location: str
    first: int
    end: int | None
    operations: list[Operation] = field(default_factory=list)
    effects: list[int] = field(default_factory=list)
    leaves: list[list[Any]] = field(default_factory=list)
    constants: dict[_Constant, int] = field(default_factory=dict)
    #: Operations that may raise an error; and how many of those there are that the last effect comes behind.
    risky: set[int] = field(default_factory=set)

    def emit(self, name: str, arguments: list[Any], options: dict[str, Any] | None = None) -> int:
        """Add an operation. Returns its register."""
        if len(self.operations) >= _MOST_OPERATIONS:
            raise _Unclear
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
        if name in _SURE and len(arguments) == 1 and not options:
            return True
        plain = all(isinstance(one, bool | int | float) for one in arguments[1:])
        return plain and name.removeprefix("i") in ("add", "sub", "mul", "truediv", "fill_")

    def root(self, number: int) -> int:
        """The register whose memory a register's value shares.

        Raises:
            _Unclear: that depends on the value.
        """
        while number:
            name, given = self.operations[number - 1].name, self.operations[number - 1].arguments
            if name in _PERHAPS_PARTS:
                raise _Unclear
            if name not in _PARTS:
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
            _Unclear: another operation may raise an error.
        """
        needed: set[int] = set()
        waiting = list(self.effects)
        while waiting:
            one = waiting.pop()
            if one and one not in needed:
                needed.add(one)
                waiting += _registers(self.operations[one - 1])
        if any(one not in needed for one in self.risky):
            raise _Unclear
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


def edits_of(block: Block, paths: ModelPaths) -> list[Edit] | None:
    """All that a block writes; `None` if that is not known from its source.

    Args:
        block: one that only computes (`Account.computes`).
        paths: of the model's modules.
    """
    try:
        tree = parsed(block.source)
        finder = _Finder(block, paths, tree)
        finder.run(tree)
        return finder.edits()
    except Exception:  # whatever a source does to this module, the model's thread goes on
        return None


class _Finder:
    """Goes through one block."""

    def __init__(self, block: Block, paths: ModelPaths, tree: ast.Module) -> None:
        self._paths = paths
        self._edits: dict[str, _Growing] = {}
        #: Where the block is, and how many visits of locations there were.
        self._at: str | None = None
        self._visit = 0
        #: How far the block is in the model's pass: the layer, and whether the layer is over. And whether it may have
        #: failed or ended before it comes to the statement under way.
        self._reached = (-1, False)
        self._unsure = False
        #: In which steps the statement under way is run; and whether it may also not be.
        self._steps: tuple[int, int | None] | None = (0, 1)
        self._maybe = 0
        model, tracer, live = block.parameters
        self._names: dict[str, Any] = {model: _Module("model"), tracer: _Name("tracer"), live: _Name("live")}
        self._names |= {name: _Name(module) for name, module in block.modules.items()}
        self._names |= {
            name: _Module(paths.same[f"model.{path}" if path else "model"]) for name, path in block.paths.items()
        }
        variables = unpack(block.variables)
        self._names |= {name: _variable(name, value) for name, value in variables.items()}
        self._arrays = frozenset([name for name, value in variables.items() if isinstance(value, np.ndarray)])
        #: The names that stand for nothing but numbers, texts and containers that the block has made itself.
        self._own = _own_names(tree)
        #: Whether the block adds to a container that may be one of its variables; and whether it goes through one.
        self._fills = self._goes_by_list = False

    def edits(self) -> list[Edit]:
        """What was found.

        Raises:
            _Unclear: it may be otherwise, for what the block does elsewhere.
        """
        found = [one.done() for one in self._edits.values() if one.effects]
        if self._fills and (self._goes_by_list or any(len(leaf) > 1 for one in found for leaf in one.leaves)):
            raise _Unclear
        if not all(map(_is_one_way, found)):
            raise _Unclear
        return found

    def run(self, tree: ast.Module) -> None:
        """Go through the block.

        Raises:
            _Unclear: what it writes is not known.
        """
        if any(isinstance(node, ast.Break | ast.Continue | ast.Lambda | ast.NamedExpr) for node in ast.walk(tree)):
            raise _Unclear
        self._body(tree.body)

    # --- locations ----------------------------------------------------------------------------------------------------

    def _ask(self, location: str) -> _Register:
        """The value of a location that the block asks for."""
        if self._at != location:
            self._at = location
            self._visit += 1
            self._pass(location)
        growing = self._edits.get(location)
        if self._steps is None:
            return _Register(_Growing(location, 0, 0), 0, -1)
        if growing is None:
            growing = self._edits[location] = _Growing(location, *self._steps)
        elif (growing.first, growing.end) != self._steps:
            # It may be in several loops.
            if growing.effects:
                raise _Unclear
            growing = self._edits[location] = _Growing(location, *self._steps)
        return _Register(growing, 0, self._visit)

    def _pass(self, location: str) -> None:
        """Note how far a block is that has come to a location. One that the model has passed raises an error."""
        head, _, end = location.removeprefix(f"{self._paths.layers}.").partition(".")
        if location == "model.logits":
            reached = (len(self._paths.children[self._paths.layers]), True)
        elif location.startswith(f"{self._paths.layers}.") and head.isdecimal():
            reached = (int(head), end == "output")
        else:
            reached = self._reached
        self._unsure |= reached <= self._reached or not self._paths.serves(location)
        self._reached = max(reached, self._reached)

    def _doubt(self, value: Any = _OTHER) -> Any:
        """Take it that the block may have failed. Returns a value."""
        self._unsure = True
        return value

    def _leave(self) -> None:
        """Take it that the block may have gone on to another location."""
        self._at = None
        self._visit += 1

    def _change(self, target: Any, name: str, arguments: list[Any], options: dict[str, Any] | None = None) -> Any:
        """Take an operation that changes its first argument in place."""
        if isinstance(target, _Other) and target.own:
            return self._doubt(target)
        if not isinstance(target, _Register) or self._maybe or target.visit != self._visit or self._unsure:
            raise _Unclear
        edit = target.edit
        root = edit.root(target.number)
        if edit.is_constant(root):
            # The next step would find it changed.
            raise _Unclear
        changed = self._operation(name, [target, *arguments], options or {})
        if not isinstance(changed, _Register):
            raise _Unclear
        edit.effects.append(changed.number)
        if root and edit.operations[root - 1].name == "stream":
            self._put_stream(edit, root)
        return changed

    @staticmethod
    def _put_stream(edit: _Growing, stream: int) -> None:
        """Have a residual stream put into the layer's output."""
        edit.effects.append(edit.emit("put_stream", [["r", 0], ["r", stream]]))

    # --- statements ---------------------------------------------------------------------------------------------------

    def _body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Expr):
            self._value(node.value)
        elif isinstance(node, ast.Assign):
            value = self._value(node.value)
            for target in node.targets:
                self._assign(target, value)
        elif isinstance(node, ast.AugAssign):
            self._augment(node)
        elif isinstance(node, ast.For):
            self._loop(node)
        elif isinstance(node, ast.If):
            if not self._is_of_step(node.test):
                self._doubt(self._value(node.test))
            self._perhaps(node)
        elif not isinstance(node, ast.Pass):
            raise _Unclear

    def _perhaps(self, node: ast.For | ast.If) -> None:
        """Go through statements that may be run once, never, or many times."""
        self._forget(node)
        self._leave()
        self._maybe += 1
        self._body([*node.body, *node.orelse])
        self._maybe -= 1
        self._forget(node)
        self._leave()

    def _forget(self, *statements: ast.stmt) -> None:
        """Forget what the names that these statements bind stand for."""
        for statement in statements:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    known = _OTHER if self._names.get(node.id, _UNBOUND) is not _UNBOUND else _UNBOUND
                    self._names[node.id] = _OWN if known is _OTHER and node.id in self._own else known

    def _is_of_step(self, node: ast.expr) -> bool:
        """Whether a condition compares the number of the step with a number."""
        if not isinstance(node, ast.Compare) or len(node.comparators) != 1:
            return False
        return self._value(node.left) is _STEP and isinstance(self._value(node.comparators[0]), _Number)

    def _loop(self, node: ast.For) -> None:
        steps = self._steps_of(node.iter)
        if steps is not None:
            if self._steps != (0, 1) or self._maybe or node.orelse:
                raise _Unclear
            self._steps = steps
            self._leave()
            self._reached = (-1, False)
            # A name may stand for what the turn before has bound.
            self._forget(node)
            if isinstance(node.target, ast.Name):
                self._names[node.target.id] = _STEP
            self._body(node.body)
            self._forget(node)
            # What follows is run in a step that depends on the loop.
            self._steps = None
            self._leave()
            return
        known = literals(node.iter)
        values = self._value(node.iter) if known is None else None
        if isinstance(values, _Numbers):
            known, self._goes_by_list = values.values, True
        if known is None or node.orelse or not isinstance(node.target, ast.Name) or self._maybe:
            self._unsure = True
            self._perhaps(node)
            return
        for value in known:
            self._names[node.target.id] = _Number(value)
            self._body(node.body)

    def _steps_of(self, node: ast.expr) -> tuple[int, int | None] | None:
        """The steps through which a loop goes; `None` if it is another loop."""
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr == "all" and self._value(called.value) == _Name("tracer"):
            return 0, None
        if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Attribute):
            return None
        if node.value.attr != "iter" or self._value(node.value.value) != _Name("tracer"):
            return None
        chosen = node.slice
        if isinstance(chosen, ast.Slice):
            first, end = self._bound(chosen.lower), self._bound(chosen.upper)
            if chosen.step is not None:
                raise _Unclear
            return first or 0, end
        number = self._bound(chosen)
        assert number is not None
        return number, number + 1

    def _bound(self, node: ast.expr | None) -> int | None:
        if node is None:
            return None
        found = self._value(node)
        if not isinstance(found, _Number) or type(found.value) is not int or found.value < 0:
            raise _Unclear
        return found.value

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self._names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            self._unpack(target.elts, value)
        elif isinstance(target, ast.Subscript):
            base = self._value(target.value)
            if isinstance(base, _Other) and base.own and isinstance(target.value, ast.Name):
                self._value(target.slice)
                self._unsure = True
                return
            self._change(base, "setitem", [value, *self._places(target.slice)])
        else:
            assert isinstance(target, ast.Attribute)
            owner = self._value(target.value)
            if not isinstance(owner, _Stream) or target.attr != "output":
                raise _Unclear
            self._assign_stream(owner, value)

    def _assign_stream(self, owner: _Stream, value: Any) -> None:
        whole = self._ask(f"{owner.path}.output")
        known = isinstance(value, _Register) and value.edit is whole.edit and value.visit == self._visit
        if self._maybe or not known or self._unsure:
            raise _Unclear
        self._put_stream(whole.edit, value.number)

    def _unpack(self, targets: list[ast.expr], value: Any) -> None:
        if not all(isinstance(one, ast.Name) for one in targets):
            raise _Unclear
        whole = isinstance(value, _Register) and value.number == 0
        for place, one in enumerate(targets):
            assert isinstance(one, ast.Name)
            self._names[one.id] = self._operation("getitem", [value, _Number(place)], {}) if whole else self._doubt()

    def _augment(self, node: ast.AugAssign) -> None:
        name = _OPERATORS.get(type(node.op))
        target = node.target
        if isinstance(target, ast.Name):
            held = self._names.get(target.id, _OTHER)
            value = self._value(node.value)
            if isinstance(held, _Number):
                self._names[target.id] = self._of_numbers(name or "", held, value)
            elif isinstance(held, _Register) and name is not None:
                self._names[target.id] = self._change(held, f"i{name}", [value])
            elif target.id not in self._own or not isinstance(held, _Other):
                raise _Unclear
            else:
                self._unsure |= not isinstance(value, _Number)
            return
        if name is None:
            raise _Unclear
        if isinstance(target, ast.Subscript):
            base = self._value(target.value)
            if not isinstance(base, _Register):
                raise _Unclear
            held = self._operation("getitem", [base, *self._places(target.slice)], {})
            self._change(held, f"i{name}", [self._value(node.value)])
        else:
            owner = self._value(target.value)
            if not isinstance(owner, _Stream) or target.attr != "output":
                raise _Unclear
            held = self._stream(owner)
            value = self._operation(f"i{name}", [held, self._value(node.value)], {})
            self._assign_stream(owner, value)

    # --- expressions --------------------------------------------------------------------------------------------------

    def _value(self, node: ast.expr | None) -> Any:
        match node:
            case ast.Constant(value=bool() | int() | float() as number):
                return _Number(number)
            case None | ast.Constant():
                return _OWN
            case ast.Name():
                found = self._names.get(node.id, _UNBOUND)
                return self._doubt(found) if found is _UNBOUND else found
            case ast.Attribute():
                return self._attribute(node)
            case ast.Subscript():
                return self._item(node)
            case ast.Call():
                return self._call(node)
            case ast.BinOp():
                left, right = self._value(node.left), self._value(node.right)
                name = _OPERATORS.get(type(node.op), "")
                found = self._of_numbers(name, left, right)
                if found is _OTHER and name:
                    found = self._operation(name, [left, right], {})
                return self._doubt(_OWN) if isinstance(found, _Other) else found
            case ast.UnaryOp(op=ast.USub()):
                value = self._value(node.operand)
                if isinstance(value, _Number):
                    return _Number(-value.value)
                found = self._operation("neg", [value], {})
                return self._doubt(_OWN) if isinstance(found, _Other) else found
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                return self._comprehension(node)
            case ast.IfExp() | ast.BoolOp() | ast.Compare():
                # Not all of it may be run.
                self._leave()
                self._maybe += 1
                self._parts(node)
                self._maybe -= 1
                self._leave()
            case ast.List() | ast.Tuple() | ast.Dict(keys=[]):
                self._parts(node)
                return _OWN if is_container(node) else _OTHER
            case _:
                self._parts(node)
        return self._doubt(_OWN if is_new(node) else _OTHER)

    def _parts(self, node: ast.expr) -> None:
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr):
                self._value(part)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> Any:
        """A comprehension, whose parts may be run any number of times."""
        outer = dict(self._names)
        self._leave()
        self._maybe += 1
        for one in node.generators:
            self._value(one.iter)
            for name in ast.walk(one.target):
                if isinstance(name, ast.Name):
                    self._names[name.id] = _OTHER
            for condition in one.ifs:
                self._value(condition)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self._value(part)
        self._maybe -= 1
        self._leave()
        self._names = outer
        return self._doubt(_OWN if is_container(node) else _OTHER)

    @staticmethod
    def _of_numbers(name: str, left: Any, right: Any) -> Any:
        """An operation on two numbers; of nothing but them, nothing is known."""
        if not isinstance(left, _Number) or not isinstance(right, _Number) or name not in _ON_NUMBERS:
            return _OTHER
        try:
            return _Number(_ON_NUMBERS[name](left.value, right.value))
        except ArithmeticError:
            return _OTHER

    def _attribute(self, node: ast.Attribute) -> Any:
        owner, name = self._value(node.value), node.attr
        if isinstance(owner, _Module):
            return self._of_module(owner.path, name)
        if isinstance(owner, _Stream) and name == "output":
            return self._stream(owner)
        if isinstance(owner, _Name) and owner.what == "torch" and name in _DTYPES:
            return _Dtype(name)
        if isinstance(owner, _Register) and name in ("dtype", "device"):
            return self._operation("attribute", [owner, name], {})
        return self._doubt()

    def _of_module(self, path: str, name: str) -> Any:
        if name == "output":
            found = self._ask(f"{path}.output")
            return found if self._has_rows(path) else self._doubt()
        if name in ("input", "inputs"):
            self._ask(f"{path}.input")
            return _OTHER
        if path == "model" and name in ("logits", "samples"):
            found = self._ask(f"model.{name}")
            return found if name == "logits" else _OTHER
        child = self._paths.child(path, name)
        return self._doubt() if child is None else _Module(child)

    def _has_rows(self, path: str) -> bool:
        """Whether the values of a module are known to have a row for each token."""
        layers = self._paths.layers
        return bool(layers) and path.startswith(f"{layers}.")

    def _stream(self, owner: _Stream) -> Any:
        whole = self._ask(f"{owner.path}.output")
        return _Register(whole.edit, whole.edit.emit("stream", [["r", 0]]), whole.visit)

    def _item(self, node: ast.Subscript) -> Any:
        owner = self._value(node.value)
        if isinstance(owner, _Module):
            return self._child(owner.path, self._value(node.slice))
        if isinstance(owner, _Leaf):
            key = self._value(node.slice)
            if isinstance(key, _Number):
                return _Leaf(owner.name, (*owner.keys, key.value))
            text = node.slice.value if isinstance(node.slice, ast.Constant) else None
            return _Leaf(owner.name, (*owner.keys, text)) if isinstance(text, str) else self._doubt()
        if not isinstance(owner, _Register):
            self._value(node.slice)
            return self._doubt()
        try:
            places = self._places(node.slice)
        except _Unclear:
            # It may still be a part of the model's value.
            return self._doubt()
        found = self._operation("getitem", [owner, *places], {})
        return self._doubt() if found is _OTHER else found

    def _child(self, path: str, index: Any) -> Any:
        children = self._paths.children[path]
        if not isinstance(index, _Number) or type(index.value) is not int:
            return self._doubt()
        if not -len(children) <= index.value < len(children):
            return self._doubt()
        return _Module(self._paths.same[f"{path}.{children[index.value]}"])

    def _places(self, node: ast.expr) -> list[Any]:
        """What stands in brackets behind a tensor: numbers and slices of numbers."""
        parts = node.elts if isinstance(node, ast.Tuple) else [node]
        return [self._place(part) for part in parts]

    def _place(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and node.value is Ellipsis:
            return ["e"]
        if isinstance(node, ast.Constant) and node.value is None:
            return ["n"]
        if isinstance(node, ast.Slice):
            bounds = [None if one is None else self._integer(one) for one in (node.lower, node.upper, node.step)]
            return ["s", *bounds]
        return _Number(self._integer(node))

    def _integer(self, node: ast.expr) -> int:
        found = self._value(node)
        if not isinstance(found, _Number) or type(found.value) is not int:
            raise _Unclear
        return found.value

    def _call(self, node: ast.Call) -> Any:
        function = node.func
        if not isinstance(function, ast.Attribute):
            self._arguments(node)
            return self._doubt(_OWN if is_new(node) or is_container(node) else _OTHER)
        owner, name = self._value(function.value), function.attr
        if isinstance(owner, _Module):
            return self._of_model(owner, name, node)
        arguments, options = self._arguments(node)
        if name == "save":
            return owner
        if name.endswith("_"):
            if name not in _IN_PLACE or not options.keys() <= _OPTIONS:
                raise _Unclear
            return self._change(owner, name, arguments, options)
        if name in _FILLING:
            if not isinstance(owner, _Other):
                raise _Unclear
            self._fills |= not owner.own
            return _OTHER if owner.own and name == "append" and not options else self._doubt()
        if name in _METHODS and options.keys() <= _OPTIONS:
            found = self._operation(name, [owner, *arguments], options)
            if found is not _OTHER:
                return found
        if isinstance(owner, _Register) and name in _SURE_OTHERS and not arguments and not options:
            return _OTHER
        # The tracer's `stop` ends a block, too.
        return self._doubt(_OWN if is_new(node) else _OTHER)

    def _of_model(self, owner: _Module, name: str, node: ast.Call) -> Any:
        arguments, options = self._arguments(node)
        if owner.path != "model" or name != "residual" or len(arguments) != 1 or options or not self._paths.layers:
            raise _Unclear
        layer = self._child(self._paths.layers, arguments[0])
        return _Stream(layer.path) if isinstance(layer, _Module) else self._doubt()

    def _arguments(self, node: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        # What a star stands for is nothing that is known: `_value` says so of `ast.Starred`.
        return [self._value(one) for one in node.args], {
            word.arg or "": self._value(word.value) for word in node.keywords
        }

    # --- operations ---------------------------------------------------------------------------------------------------

    def _is_sure_of(self, made: _Constant) -> bool:
        """Whether an operation on variables raises no error."""
        tensors = [one for one in made.arguments if not isinstance(one, _Number | _Dtype)]
        if made.options or not all(isinstance(one, _Constant) or one.name in self._arrays for one in tensors):
            return False
        if any(isinstance(one, _Leaf) and one.keys for one in tensors):
            return False
        if made.name in _SURE or made.name == "to":
            return len(made.arguments) == 1 or isinstance(made.arguments[1], _Dtype)
        single = [one for one in tensors if isinstance(one, _Constant) and one.name in ("norm", "sum")]
        return made.name in ("add", "sub", "mul", "truediv") and len(tensors) - len(single) <= 1

    def _operation(self, name: str, arguments: list[Any], options: dict[str, Any]) -> Any:
        """An operation, in the edit of the location to which its arguments belong."""
        registers = [one for one in [*arguments, *options.values()] if isinstance(one, _Register)]
        if not all(map(_is_known, [*arguments, *options.values()])):
            return _OTHER
        if not registers:
            made = _Constant(name, arguments, options)
            return made if self._is_sure_of(made) else self._doubt(made)
        edit = registers[0].edit
        if any(one.edit is not edit or one.visit != self._visit for one in registers) or self._steps is None:
            return _OTHER
        encoded = [_encoded(edit, one) for one in arguments]
        number = edit.emit(name, encoded, {key: _encoded(edit, one) for key, one in options.items()})
        return _Register(edit, number, self._visit)


def _is_known(argument: Any) -> bool:
    return not isinstance(argument, _Other | _Module | _Stream | _Name | _Numbers)


def _encoded(edit: _Growing, argument: Any) -> Any:
    """An argument of an operation (see `Operation`)."""
    match argument:
        case _Register():
            return ["r", argument.number]
        case _Number():
            return argument.value
        case _Dtype():
            return ["d", argument.name]
        case _Leaf():
            leaf = [argument.name, *argument.keys]
            if leaf not in edit.leaves:
                edit.leaves.append(leaf)
            return ["v", edit.leaves.index(leaf)]
        case _Constant():
            if argument not in edit.constants:
                arguments = [_encoded(edit, one) for one in argument.arguments]
                options = {key: _encoded(edit, one) for key, one in argument.options.items()}
                edit.constants[argument] = edit.emit(argument.name, arguments, options)
            return ["r", edit.constants[argument]]
    assert isinstance(argument, list | str)
    return argument


def _variable(name: str, value: Any) -> Any:
    """What a variable stands for."""
    if isinstance(value, bool | int | float):
        return _Number(value)
    if isinstance(value, list) and all(type(one) is int for one in value):
        return _Numbers(tuple(value))
    return _Leaf(name) if isinstance(value, np.ndarray | list | tuple | dict) else _OTHER


def _is_one_way(edit: Edit) -> bool:
    """Whether a block that changes a residual stream changes the layer's output in no other way."""
    effects = [one for one in edit.operations if one.name in _PARTS - {"getitem"} or one.name == "put_stream"]
    streams = [one.name == "put_stream" for one in effects]
    if not any(streams):
        return True
    growing = _Growing(edit.location, 0, None, list(edit.operations))
    return all(one.name == "put_stream" or growing.root(one.arguments[0][1]) for one in effects)


def _own_names(tree: ast.Module) -> set[str]:
    """The names to which nothing is ever assigned but numbers, texts, and new lists, dicts and sets."""
    assigned: dict[str, list[ast.expr | None]] = {}
    for name, value in _bindings(tree):
        assigned.setdefault(name, []).append(value)
    return {name for name, values in assigned.items() if all(map(_is_plain, values))}


def _is_plain(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) or (node is not None and is_container(node))


def _bindings(tree: ast.Module) -> Iterator[tuple[str, ast.expr | None]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value
                else:
                    yield from ((one.id, None) for one in ast.walk(target) if isinstance(one, ast.Name))
        elif isinstance(node, ast.For | ast.comprehension):
            yield from ((one.id, None) for one in ast.walk(node.target) if isinstance(one, ast.Name))
