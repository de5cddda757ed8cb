"""Finds names that occur only in code that never runs, as under `if DEBUG:` where `DEBUG` is False.

Such a name needs no value on the engine. The value of a condition is known if it consists of constants, of names with
plain values that travel with the block and that the code does not bind, and of attributes of such names.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .source import FunctionSource

__all__ = ["is_dead"]

_UNKNOWN = object()
_PLAIN = (type(None), bool, int, float, str)
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def is_dead(name: str, source: FunctionSource, meaning: Callable[[str], Any]) -> bool:
    """Whether `source` uses `name` only in code that never runs.

    `meaning` returns the value of a name, and raises a `ValueError` for one without a value.
    """
    return _Reach(source.travelling, meaning).lacks(name)


class _Reach:
    """The code that may run, below some nodes."""

    def __init__(self, nodes: Iterable[ast.AST], meaning: Callable[[str], Any]) -> None:
        self._nodes = list(nodes)
        self._meaning = meaning
        self._bound = {
            node.id
            for root in self._nodes
            for node in ast.walk(root)
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
        }

    def lacks(self, name: str) -> bool:
        """Whether no code that may run uses `name`."""
        waiting = list(self._nodes)
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.Name) and node.id == name:
                return False
            waiting += self._running(node)
        return True

    def _running(self, node: ast.AST) -> list[ast.AST]:
        """The children of a node that may run."""
        match node:
            case ast.If(test=test, body=body, orelse=orelse):
                return [test, *self._branches(test, body, orelse)]
            case ast.IfExp(test=test, body=chosen, orelse=other):
                return [test, *self._branches(test, [chosen], [other])]
            case ast.While(test=test, body=body, orelse=orelse):
                value = self._value(test)
                return [test, *(orelse if value is not _UNKNOWN and not value else [*body, *orelse])]
            case ast.BoolOp(op=op, values=values):
                running: list[ast.AST] = []
                for one in values:
                    running.append(one)
                    value = self._value(one)
                    if value is not _UNKNOWN and bool(value) is isinstance(op, ast.Or):
                        break
                return running
        return list(ast.iter_child_nodes(node))

    def _branches(self, test: ast.expr, body: list[Any], orelse: list[Any]) -> list[Any]:
        value = self._value(test)
        if value is _UNKNOWN:
            return [*body, *orelse]
        return body if value else orelse

    def _value(self, node: ast.expr) -> Any:
        """The plain value of an expression, or `_UNKNOWN`."""
        value: Any = _UNKNOWN
        match node:
            case ast.Constant(value=constant):
                value = constant
            case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
                value = False
            case ast.Name() | ast.Attribute():
                value = self._object(node)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self._value(operand)
                value = _UNKNOWN if inner is _UNKNOWN else not inner
            case ast.BoolOp(op=op, values=values):
                for one in values:
                    value = self._value(one)
                    if value is _UNKNOWN or bool(value) is isinstance(op, ast.Or):
                        break
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
                pair = self._value(left), self._value(right)
                if _UNKNOWN not in pair:
                    try:
                        value = _COMPARISONS[type(op)](*pair)
                    except TypeError:
                        value = _UNKNOWN
        return value if isinstance(value, _PLAIN) else _UNKNOWN

    def _object(self, node: ast.expr) -> Any:
        """The value of a name, or of an attribute in the `__dict__` of one; `_UNKNOWN` otherwise."""
        if isinstance(node, ast.Name):
            if node.id in self._bound:
                return _UNKNOWN
            try:
                return self._meaning(node.id)
            except ValueError:
                return _UNKNOWN
        if isinstance(node, ast.Attribute) and (owner := self._object(node.value)) is not _UNKNOWN:
            return getattr(owner, "__dict__", {}).get(node.attr, _UNKNOWN)
        return _UNKNOWN
