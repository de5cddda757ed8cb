"""What the names of a block stand for, while `known_edits.py` goes through its source."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tracewire_bus.wire.messages import Block
from tracewire_bus.wire.packing import unpack
from tracewire_engine.protocol.known_edits import LIVE_LEAF

from .edit_symbols import OTHER, OWN, UNBOUND, Leaf, Module, Name, Number, Numbers, is_live
from .reading import ModelPaths, is_container

__all__ = ["EditNames", "stored"]


class EditNames(dict[str, Any]):
    """The symbols of a block's names.

    Args:
        block: whose names these are.
        paths: of the model's modules.
        tree: the block's source.
        live: values of its live parameters, by name: others of these forms may take their place.
    """

    def __init__(self, block: Block, paths: ModelPaths, tree: ast.Module, live: Mapping[str, Any]) -> None:
        super().__init__()
        self.variables: dict[str, Any] = unpack(block.variables)
        held = [(Leaf(name), value) for name, value in self.variables.items()]
        held += [(_of_live(name), value) for name, value in live.items()]
        #: The variables and live parameters that are arrays of floating-point numbers; and those that are numbers.
        self.arrays = frozenset([leaf for leaf, value in held if _is_floating(value)])
        self.numbers = frozenset([leaf for leaf, value in held if type(value) in (int, float)])
        model, tracer, steered = block.parameters
        self |= {model: Module("model"), tracer: Name("tracer"), steered: Name("live")}
        self |= {name: Name(module) for name, module in block.modules.items()}
        self |= {name: Module(paths.same[f"model.{path}" if path else "model"]) for name, path in block.paths.items()}
        self |= {name: _variable(name, value) for name, value in self.variables.items()}
        #: The names that stand for nothing but numbers, texts and containers that the block has made itself; those
        #: that stand for such containers; and those that stand for numbers.
        self.own, self.containers = _own_names(tree, _is_plain), _own_names(tree, is_container)
        self.counts = _own_names(tree, _is_number)

    def forget(self, statement: ast.stmt) -> list[str]:
        """Forget what the names that a statement binds stand for. Returns those that stood for nothing."""
        unbound = []
        for name in stored(statement):
            if self.get(name, UNBOUND) is UNBOUND:
                unbound.append(name)
                self[name] = UNBOUND
            else:
                self[name] = OWN if name in self.own else OTHER
        return unbound

    def live(self, name: str) -> Any:
        """What a live parameter stands for; `OTHER` if there is none of this name, or an edit cannot use it."""
        leaf = _of_live(name)
        return leaf if leaf in self.arrays or leaf in self.numbers else OTHER

    def forget_live(self) -> None:
        """Forget the live parameters that names stand for: their values are those of other steps."""
        self |= {name: OTHER for name, value in self.items() if is_live(value)}

    def item(self, owner: Leaf, place: ast.expr, key: Any) -> Any:
        """What an item of a variable stands for; `OTHER` if there may be none.

        Args:
            owner: the variable, or an item of it.
            place: what stands in brackets.
            key: what that stands for.
        """
        known = key.value if isinstance(key, Number) else place.value if isinstance(place, ast.Constant) else None
        if type(known) not in (int, str) or owner.name == LIVE_LEAF:
            return OTHER
        leaf = Leaf(owner.name, (*owner.keys, known))
        value = self.variables[leaf.name]
        try:
            for one in leaf.keys:
                value = value[one]
        except (LookupError, TypeError, ValueError):
            return OTHER
        return leaf


def _of_live(name: str) -> Leaf:
    return Leaf(LIVE_LEAF, (name,))


def _is_floating(value: Any) -> bool:
    """Whether a value is an array of floating-point numbers."""
    return isinstance(value, np.ndarray) and value.dtype.kind in "fV"


def _variable(name: str, value: Any) -> Any:
    """What a variable stands for."""
    if isinstance(value, bool | int | float):
        return Number(value)
    if isinstance(value, list) and all(type(one) is int for one in value):
        return Numbers(tuple(value))
    return Leaf(name) if isinstance(value, np.ndarray | list | tuple | dict) else OTHER


def _own_names(tree: ast.Module, check: Callable[[ast.expr], bool]) -> set[str]:
    """The names to which nothing is ever assigned but what passes a check."""
    assigned: dict[str, list[ast.expr | None]] = {}
    for name, value in _bindings(tree):
        assigned.setdefault(name, []).append(value)
    return {name for name, values in assigned.items() if all(one is not None and check(one) for one in values)}


def stored(node: ast.AST) -> list[str]:
    """The names that a statement, or a target, binds."""
    return [one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _is_plain(node: ast.expr) -> bool:
    """Whether an expression is a number or a text, or makes a list, a dict or a set."""
    return isinstance(node, ast.Constant) or is_container(node)


def _bindings(tree: ast.Module) -> Iterator[tuple[str, ast.expr | None]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value
                else:
                    yield from ((name, None) for name in stored(target))
        elif isinstance(node, ast.For | ast.comprehension):
            yield from ((name, None) for name in stored(node.target))
