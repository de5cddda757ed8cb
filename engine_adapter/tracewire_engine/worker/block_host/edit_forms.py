"""Whether the edits of requests with one row each can be done to the rows of all of them at once.

They can if each row of every result is what comes of that row alone: the operations take each row by itself, and each
result that has an axis of rows for one request has it for several.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np

from tracewire_engine.protocol.known_edits import Edit, Operation

__all__ = ["bases_of", "is_by_row", "is_exact", "items_of"]


class _Form(Enum):
    """What an operation makes of one row.

    `ROWS`: a row, with an axis of rows before it. `ROW`: a row without that axis. `NUMBERS`: a number, with an axis of
    rows. `COLUMN`: the same, with another axis behind that. `VECTOR` and `NUMBER` have nothing of the model's. `NAME`
    is a dtype or a device.
    """

    ROWS, ROW, NUMBERS, COLUMN, VECTOR, NUMBER, NAME = range(7)


_R, _V, _S, _C, _K, _N = _Form.ROWS, _Form.ROW, _Form.NUMBERS, _Form.COLUMN, _Form.VECTOR, _Form.NUMBER

#: What comes of two forms, element by element.
_TWO = {
    (_R, _R): _R,
    (_R, _C): _R,
    (_R, _K): _R,
    (_V, _V): _V,
    (_V, _K): _V,
    (_S, _S): _S,
    (_C, _C): _C,
    (_C, _K): _R,
    (_K, _K): _K,
} | {(one, _N): one for one in (_R, _V, _S, _C, _K, _N)}

_BINARY = frozenset({"add", "sub", "mul", "truediv"})
_IN_PLACE = frozenset({f"i{name}" for name in _BINARY} | {"add_", "copy_", "div_", "mul_", "sub_"})
_CHANGES = frozenset({"clamp_", "fill_", "neg_", "relu_", "zero_"})
_UNARY = frozenset(
    {"abs", "bfloat16", "clamp", "clone", "contiguous", "detach", "double", "exp", "float", "half", "neg", "relu"}
    | {"rsqrt", "sigmoid", "sign", "sqrt", "square", "tanh", "to", "type_as"}
)
_SUMS = frozenset({"mean", "norm", "sum"})

#: Operations that come to the same bits whatever lies beside a row.
_EXACT = (_BINARY | _IN_PLACE | _CHANGES | _UNARY) - frozenset({"exp", "rsqrt", "sigmoid", "tanh"})
_EXACT |= {"attribute", "getitem", "put_stream", "setitem", "stream", "unpack"}


class _NotByRow(Exception):
    pass


def is_exact(edit: Edit) -> bool:
    """Whether each row comes to the same bits if an edit is done to several rows at once."""
    return all(one.name in _EXACT for one in edit.operations)


def is_by_row(edit: Edit, leaves: Sequence[Any], *, whole: bool) -> bool:
    """Whether an edit can be done to the rows of several requests at once.

    Args:
        edit: what is done.
        leaves: the values of its leaves: numbers, and arrays of at most one axis.
        whole: whether the location's value is a tensor, and not a tuple of tensors.
    """
    try:
        _Forms(edit, leaves, whole=whole).check()
    except _NotByRow:
        return False
    return True


def bases_of(edit: Edit, *, whole: bool) -> frozenset[int]:
    """The registers that are tensors of the model's value, of which each row is a token's or a request's.

    Args:
        edit: what is done.
        whole: whether the location's value is such a tensor, and not a tuple of them.
    """
    found = {0} if whole else set()
    for number, one in enumerate(edit.operations, 1):
        if one.name == "stream" or (not whole and _item_of(one) is not None):
            found.add(number)
    return frozenset(found)


def items_of(edit: Edit, *, whole: bool) -> frozenset[int] | None:
    """The items of the location's value that an edit uses; `None` for all."""
    if whole or any(one.name in ("stream", "put_stream") for one in edit.operations):
        return None
    found = [_item_of(one) for one in edit.operations]
    return frozenset([one for one in found if one is not None])


def _item_of(operation: Operation) -> int | None:
    """Which item of the location's value an operation takes, if it takes one."""
    name, given = operation.name, operation.arguments
    fits = name == "getitem" and len(given) == 2 and given[0] == ["r", 0] and type(given[1]) is int
    return given[1] if fits else None


class _Forms:
    """The forms of an edit's registers."""

    def __init__(self, edit: Edit, leaves: Sequence[Any], *, whole: bool) -> None:
        self._edit, self._leaves, self._bases = edit, leaves, bases_of(edit, whole=whole)
        self._found: list[_Form | None] = [_R if whole else None]
        #: Whether columns of a tensor are used by themselves: they overlap with others in one row, and not in several.
        self._columns = False

    def check(self) -> None:
        """Go through the operations.

        Raises:
            _NotByRow: one of them cannot be done to several rows at once.
        """
        for number, one in enumerate(self._edit.operations, 1):
            self._found.append(_R if number in self._bases else self._after(one))

    def _form(self, argument: Any) -> _Form:
        found: _Form | None
        match argument:
            case ["r", number]:
                found = self._found[number]
            case ["v", leaf]:
                value = self._leaves[leaf]
                found = _K if isinstance(value, np.ndarray) and value.ndim else _N
            case bool() | int() | float():
                found = _N
            case ["d", _]:
                found = _Form.NAME
            case _:
                found = None
        if found is None:
            raise _NotByRow
        return found

    def _after(self, one: Operation) -> _Form | None:
        name, given = one.name, one.arguments
        if name == "unpack":
            # Of a tensor it would be the rows.
            if self._found[0] is not None:
                raise _NotByRow
            return None
        if name == "put_stream":
            return self._only(self._form(given[1]), _R)
        if name == "attribute":
            return _Form.NAME
        if name == "getitem":
            return self._item(given[0], given[1:])
        if name == "setitem":
            target, value = self._item(given[0], given[2:]), self._form(given[1])
            if self._columns and value not in (_K, _N):
                raise _NotByRow
            return self._put(target, value)
        of = self._form(given[0])
        if name in _CHANGES or name in _UNARY:
            for more in [*given[1:], *one.options.values()]:
                if self._form(more) not in (_N, _Form.NAME) and name != "type_as":
                    raise _NotByRow
            return of
        if name in _SUMS:
            return self._sum(of, one)
        if name == "unsqueeze" and of is _S and given[1:] in ([-1], [1]) and not one.options:
            return _C
        if one.options or len(given) != 2:
            raise _NotByRow
        return self._two(name, of, self._form(given[1]))

    def _two(self, name: str, of: _Form, other: _Form) -> _Form:
        if name == "matmul":
            if other is _K and of in (_R, _K):
                return _S if of is _R else _N
            raise _NotByRow
        found = _TWO.get((of, other)) or _TWO.get((other, of))
        if self._columns and name in _IN_PLACE and other not in (_K, _N):
            raise _NotByRow
        if found is None or (name in _IN_PLACE and found is not of) or name not in _BINARY | _IN_PLACE:
            raise _NotByRow
        return found

    @staticmethod
    def _sum(of: _Form, one: Operation) -> _Form:
        if len(one.arguments) > 1:
            raise _NotByRow
        if not one.options and of in (_K, _N):
            return _N
        if one.options.get("dim") != -1 or of is not _R or one.options.keys() - {"dim", "keepdim"}:
            raise _NotByRow
        return _C if one.options.get("keepdim") is True else _S

    def _item(self, of: Any, places: list[Any]) -> _Form:
        """What stands in brackets behind a tensor."""
        if of[0] == "r" and of[1] not in self._bases and self._found[of[1]] is _S and places[1:] == [["n"]]:
            # A slice of all numbers, with another axis behind it.
            return self._only(_C if places[0] == ["s", None, None, None] else None, _C)
        if of[0] != "r" or of[1] not in self._bases or len(places) > 2 or not _takes_the_row(places[0]):
            raise _NotByRow
        rows = not isinstance(places[0], int)
        if len(places) == 1:
            return _R if rows else _V
        (column,) = places[1:]
        self._columns = True
        if isinstance(column, int):
            return self._only(_S if rows else None, _S)
        return self._only((_R if rows else _V) if column[0] == "s" else None, _R, _V)

    @staticmethod
    def _put(target: _Form, value: _Form) -> _Form:
        if value is target or value is _N or _TWO.get((target, value)) is target:
            return target
        raise _NotByRow

    @staticmethod
    def _only(found: _Form | None, *wanted: _Form) -> _Form:
        if found not in wanted or found is None:
            raise _NotByRow
        return found


def _takes_the_row(place: Any) -> bool:
    """Whether what stands in brackets first takes the only row of a tensor."""
    if isinstance(place, int):
        return place in (0, -1)
    return place == ["e"] or (place[0] == "s" and len(range(*slice(*place[1:]).indices(1))) == 1)
