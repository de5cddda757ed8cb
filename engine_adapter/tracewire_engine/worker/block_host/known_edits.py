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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

from tracewire_bus.wire.messages import Block
from tracewire_engine.protocol.known_edits import Edit

from .edit_names import EditNames
from .edit_symbols import (
    IN_PLACE,
    LIST,
    LOGITS,
    METHODS,
    ON_NUMBERS,
    OPERATORS,
    OTHER,
    OWN,
    STEP,
    SURE_OTHERS,
    UNBOUND,
    Dtype,
    Leaf,
    Module,
    Name,
    Number,
    Numbers,
    Other,
    Register,
    Stream,
    Unclear,
)
from .edit_walk import EditWalk
from .reading import ModelPaths, is_container, is_new, literals, parsed

__all__ = ["KnownEdits", "edits_of"]

#: Other methods that change nothing.
_KEEPING = frozenset({"copy", "count", "dim", "get", "index", "item", "items", "keys", "numel", "size", "values"})

#: Comparisons that say nothing of the order of numbers.
_NO_ORDER = (ast.In, ast.NotIn, ast.Is, ast.IsNot)

_DTYPES = frozenset({"float32", "float16", "bfloat16", "float64"})

_OPTIONS = frozenset({"dim", "keepdim", "dtype", "min", "max", "alpha"})


class KnownEdits(NamedTuple):
    """All that a block writes; and whether each array that it saves stays as it is after its step."""

    edits: tuple[Edit, ...]
    keeps: bool


def edits_of(block: Block, paths: ModelPaths, live: Mapping[str, Any] = MappingProxyType({})) -> KnownEdits | None:
    """All that a block writes; `None` if that is not known from its source.

    Args:
        block: one that only computes (`Account.computes`).
        paths: of the model's modules.
        live: values of its live parameters, by name. Any of the same forms may take their place.
    """
    try:
        tree = parsed(block.source)
        finder = _Finder(block, paths, tree, live)
        finder.run(tree)
        return KnownEdits(tuple(finder.walk.found()), not finder.walk.changes)
    except Exception:  # whatever a source does to this module, the model's thread goes on
        return None


class _Finder:
    """Goes through one block."""

    def __init__(self, block: Block, paths: ModelPaths, tree: ast.Module, live: Mapping[str, Any]) -> None:
        self._paths, self._names = paths, EditNames(block, paths, tree, live)
        #: Where the block is, and what it writes.
        self.walk = EditWalk(paths, self._names.arrays, self._names.numbers)

    def run(self, tree: ast.Module) -> None:
        """Go through the block.

        Raises:
            Unclear: what it writes is not known.
        """
        if any(isinstance(node, ast.Break | ast.Continue | ast.Lambda | ast.NamedExpr) for node in ast.walk(tree)):
            raise Unclear
        self._body(tree.body)

    # --- statements ---------------------------------------------------------------------------------------------------

    def _body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        self.walk.take()
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
                self.walk.doubt(self._value(node.test))
            self._perhaps(node)
        elif not isinstance(node, ast.Pass):
            raise Unclear

    def _perhaps(self, node: ast.For | ast.If) -> None:
        """Go through statements that may be run once, never, or many times."""
        unbound = self._names.forget(node)
        with self._maybe():
            self._body([*node.body, *node.orelse])
        self._names.forget(node)
        self._names |= dict.fromkeys(unbound, UNBOUND)

    @contextmanager
    def _maybe(self) -> Iterator[None]:
        """Go through something that may be run once, never, or many times."""
        visit = self.walk.visit
        self.walk.maybe += 1
        yield
        self.walk.maybe -= 1
        if self.walk.visit != visit:
            self.walk.leave()

    def _is_of_step(self, node: ast.expr) -> bool:
        """Whether a condition compares the number of the step with a number."""
        if not isinstance(node, ast.Compare) or len(node.comparators) != 1 or isinstance(node.ops[0], _NO_ORDER):
            return False
        return self._value(node.left) is STEP and isinstance(self._value(node.comparators[0]), Number)

    def _loop(self, node: ast.For) -> None:
        steps = self._steps_of(node.iter)
        if steps is not None:
            if self.walk.steps != (0, 1) or self.walk.maybe or node.orelse:
                raise Unclear
            self.walk.steps = steps
            self.walk.leave()
            if steps[0]:
                self.walk.reached = (-1, False)
            # A name may stand for what the turn before has bound.
            self._names.forget(node)
            self._names.forget_live()
            if not isinstance(node.target, ast.Name):
                raise Unclear
            self._names[node.target.id] = STEP
            self._body(node.body)
            self._names.forget(node)
            self._names.forget_live()
            # What follows is run in a step that depends on the loop.
            self.walk.steps = None
            self.walk.leave()
            return
        known = literals(node.iter)
        values = self._value(node.iter) if known is None else None
        if isinstance(values, Numbers):
            known, self.walk.goes_by_list = values.values, True
        if known is None or node.orelse or not isinstance(node.target, ast.Name) or self.walk.maybe:
            self.walk.unsure = True
            self._perhaps(node)
            return
        for value in known:
            self._names[node.target.id] = Number(value)
            self._body(node.body)

    def _steps_of(self, node: ast.expr) -> tuple[int, int | None] | None:
        """The steps through which a loop goes; `None` if it is another loop."""
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr == "all" and self._value(called.value) == Name("tracer"):
            assert isinstance(node, ast.Call)
            if node.args or node.keywords:
                raise Unclear
            return 0, None
        if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Attribute):
            return None
        if node.value.attr != "iter" or self._value(node.value.value) != Name("tracer"):
            return None
        chosen = node.slice
        if isinstance(chosen, ast.Slice):
            first, end = self._bound(chosen.lower), self._bound(chosen.upper)
            if chosen.step is not None:
                raise Unclear
            return first or 0, end
        number = self._bound(chosen)
        assert number is not None
        return number, number + 1

    def _bound(self, node: ast.expr | None) -> int | None:
        if node is None:
            return None
        found = self._value(node)
        if not isinstance(found, Number) or type(found.value) is not int or found.value < 0:
            raise Unclear
        return found.value

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self._names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            self._unpack(target.elts, value)
        elif isinstance(target, ast.Subscript):
            base = self._value(target.value)
            if isinstance(base, Other) and base.own and isinstance(target.value, ast.Name):
                self._value(target.slice)
                self.walk.unsure = True
                self.walk.changes |= target.value.id not in self._names.containers
                return
            self.walk.change(base, "setitem", [value, *self._places(target.slice)])
        else:
            assert isinstance(target, ast.Attribute)
            owner = self._value(target.value)
            if not isinstance(owner, Stream) or target.attr != "output":
                raise Unclear
            self._assign_stream(owner, value)

    def _assign_stream(self, owner: Stream, value: Any) -> None:
        whole = self.walk.ask(f"{owner.path}.output")
        known = isinstance(value, Register) and value.edit is whole.edit and value.visit == self.walk.visit
        if self.walk.maybe or not known or self.walk.unsure:
            raise Unclear
        self.walk.assign_stream(whole.edit, value.number)

    def _unpack(self, targets: list[ast.expr], value: Any) -> None:
        if not all(isinstance(one, ast.Name) for one in targets):
            raise Unclear
        whole = isinstance(value, Register) and value.number == 0 and value.visit == self.walk.visit
        if whole:
            value.edit.unpack(len(targets))
        else:
            self.walk.unsure = True
        for place, one in enumerate(targets):
            assert isinstance(one, ast.Name)
            self._names[one.id] = self.walk.operation("getitem", [value, Number(place)], {}) if whole else OTHER

    def _augment(self, node: ast.AugAssign) -> None:
        name = OPERATORS.get(type(node.op))
        target = node.target
        if isinstance(target, ast.Name):
            held = self._names.get(target.id, OTHER)
            value = self._value(node.value)
            if isinstance(held, Number):
                found = self._names[target.id] = _of_numbers(name or "", held, value)
                self.walk.unsure |= found is OTHER
                self.walk.changes |= not isinstance(value, Number)
            elif isinstance(held, Register) and name is not None:
                self._names[target.id] = self.walk.change(held, f"i{name}", [value])
            elif target.id not in self._names.own or not isinstance(held, Other):
                raise Unclear
            else:
                adds = isinstance(value, Number) and target.id in self._names.counts and name in ("add", "sub", "mul")
                self.walk.unsure |= not adds and not (held is LIST and value is LIST and name == "add")
                self.walk.changes |= not isinstance(value, Number) and target.id not in self._names.containers
            return
        if name is None:
            raise Unclear
        if isinstance(target, ast.Subscript):
            base = self._value(target.value)
            if not isinstance(base, Register) or (base.number == 0 and base.edit.location != LOGITS):
                raise Unclear
            held = self.walk.operation("getitem", [base, *self._places(target.slice)], {})
            self.walk.change(held, f"i{name}", [self._value(node.value)])
        else:
            owner = self._value(target.value)
            if not isinstance(owner, Stream) or target.attr != "output":
                raise Unclear
            held = self._stream(owner)
            value = self.walk.operation(f"i{name}", [held, self._value(node.value)], {})
            self._assign_stream(owner, value)

    # --- expressions --------------------------------------------------------------------------------------------------

    def _value(self, node: ast.expr | None) -> Any:
        match node:
            case ast.Constant(value=bool() | int() | float() as number):
                return Number(number)
            case None | ast.Constant():
                return OWN
            case ast.Name():
                found = self._names.get(node.id, UNBOUND)
                return self.walk.doubt(found) if found is UNBOUND else found
            case ast.Attribute():
                return self._attribute(node)
            case ast.Subscript():
                return self._item(node)
            case ast.Call():
                return self._call(node)
            case ast.BinOp():
                left, right = self._value(node.left), self._value(node.right)
                name = OPERATORS.get(type(node.op), "")
                found = _of_numbers(name, left, right)
                if found is OTHER and name and not (isinstance(left, Number) and isinstance(right, Number)):
                    found = self.walk.operation(name, [left, right], {})
                return self.walk.doubt(OWN) if isinstance(found, Other) else found
            case ast.UnaryOp(op=ast.USub()):
                value = self._value(node.operand)
                if isinstance(value, Number):
                    return Number(-value.value)
                found = self.walk.operation("neg", [value], {})
                return self.walk.doubt(OWN) if isinstance(found, Other) else found
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                return self._comprehension(node)
            case ast.IfExp() | ast.BoolOp() | ast.Compare():
                # Not all of it may be run.
                with self._maybe():
                    self._parts(node)
            case ast.List() | ast.Tuple() | ast.Dict(keys=[]):
                self._parts(node)
                return LIST if isinstance(node, ast.List) else OWN if is_container(node) else OTHER
            case _:
                self._parts(node)
        return self.walk.doubt(OWN if is_new(node) else OTHER)

    def _parts(self, node: ast.expr) -> None:
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr):
                self._value(part)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> Any:
        """A comprehension, whose parts may be run any number of times."""
        outer = dict(self._names)
        with self._maybe():
            for one in node.generators:
                self._value(one.iter)
                for name in ast.walk(one.target):
                    if isinstance(name, ast.Name):
                        self._names[name.id] = OTHER
                for condition in one.ifs:
                    self._value(condition)
            for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
                self._value(part)
        self._names.clear()
        self._names.update(outer)
        return self.walk.doubt(OWN if is_container(node) else OTHER)

    def _attribute(self, node: ast.Attribute) -> Any:
        owner, name = self._value(node.value), node.attr
        if isinstance(owner, Module):
            return self._of_module(owner.path, name)
        if isinstance(owner, Stream) and name == "output":
            return self._stream(owner)
        if isinstance(owner, Name) and owner.what == "torch" and name in _DTYPES:
            return Dtype(name)
        if owner == Name("live") and self.walk.steps is not None:
            found = self._names.live(name)
            return self.walk.doubt() if found is OTHER else found
        if isinstance(owner, Register) and name in ("dtype", "device"):
            return self.walk.operation("attribute", [owner, name], {})
        return self.walk.doubt()

    def _of_module(self, path: str, name: str) -> Any:
        if name == "output":
            found = self.walk.ask(f"{path}.output")
            # Those of other modules may have other rows.
            layers = self._paths.layers
            return found if layers and path.startswith(f"{layers}.") else self.walk.doubt()
        if name in ("input", "inputs"):
            self.walk.ask(f"{path}.input")
            return OTHER
        if path == "model" and name in ("logits", "samples"):
            found = self.walk.ask(f"model.{name}")
            return found if name == "logits" else OTHER
        child = self._paths.child(path, name)
        return self.walk.doubt() if child is None else Module(child)

    def _stream(self, owner: Stream) -> Any:
        whole = self.walk.ask(f"{owner.path}.output")
        return Register(whole.edit, whole.edit.emit("stream", [["r", 0]]), whole.visit)

    def _item(self, node: ast.Subscript) -> Any:
        owner = self._value(node.value)
        if isinstance(owner, Module):
            return self._child(owner.path, self._value(node.slice))
        if isinstance(owner, Leaf):
            found = self._names.item(owner, node.slice, self._value(node.slice))
            return self.walk.doubt() if found is OTHER else found
        if not isinstance(owner, Register):
            self._value(node.slice)
            return self.walk.doubt()
        try:
            places = self._places(node.slice)
        except Unclear:
            # It may still be a part of the model's value.
            return self.walk.doubt()
        found = self.walk.operation("getitem", [owner, *places], {})
        return self.walk.doubt() if found is OTHER else found

    def _child(self, path: str, index: Any) -> Any:
        children = self._paths.children[path]
        if not isinstance(index, Number) or type(index.value) is not int:
            return self.walk.doubt()
        if not -len(children) <= index.value < len(children):
            return self.walk.doubt()
        return Module(self._paths.same[f"{path}.{children[index.value]}"])

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
        return Number(self._integer(node))

    def _integer(self, node: ast.expr) -> int:
        found = self._value(node)
        if not isinstance(found, Number) or type(found.value) is not int:
            raise Unclear
        return found.value

    def _call(self, node: ast.Call) -> Any:
        function = node.func
        if not isinstance(function, ast.Attribute):
            self._arguments(node)
            return self.walk.doubt(OWN if is_new(node) or is_container(node) else OTHER)
        owner, name = self._value(function.value), function.attr
        if isinstance(owner, Module):
            return self._of_model(owner, name, node)
        arguments, options = self._arguments(node)
        if name == "save":
            return owner
        if name.endswith("_"):
            if name not in IN_PLACE or not options.keys() <= _OPTIONS:
                raise Unclear
            return self.walk.change(owner, name, arguments, options)
        if name not in METHODS | SURE_OTHERS | _KEEPING:
            # It may change a list or a dict.
            if not isinstance(owner, Other | Name | Register):
                raise Unclear
            self.walk.fills |= isinstance(owner, Other) and not owner.own
        if owner is LIST and name == "append" and len(arguments) == 1 and not options:
            return OTHER
        if name in METHODS and options.keys() <= _OPTIONS:
            found = self.walk.operation(name, [owner, *arguments], options)
            if found is not OTHER:
                return found
        whole = isinstance(owner, Register) and (owner.number or owner.edit.location == LOGITS)
        if whole and name in SURE_OTHERS and not arguments and not options:
            return OTHER
        # The tracer's `stop` ends a block, too.
        return self.walk.doubt(OWN if is_new(node) else OTHER)

    def _of_model(self, owner: Module, name: str, node: ast.Call) -> Any:
        arguments, options = self._arguments(node)
        if owner.path != "model" or name != "residual" or len(arguments) != 1 or options or not self._paths.layers:
            raise Unclear
        layer = self._child(self._paths.layers, arguments[0])
        return Stream(layer.path) if isinstance(layer, Module) else self.walk.doubt()

    def _arguments(self, node: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        # What a star stands for is nothing that is known: `_value` says so of `ast.Starred`.
        return [self._value(one) for one in node.args], {
            word.arg or "": self._value(word.value) for word in node.keywords
        }


def _of_numbers(name: str, left: Any, right: Any) -> Any:
    """An operation on two numbers; of nothing but them, nothing is known."""
    if not isinstance(left, Number) or not isinstance(right, Number) or name not in ON_NUMBERS:
        return OTHER
    try:
        return Number(ON_NUMBERS[name](left.value, right.value))
    except ArithmeticError:
        return OTHER
