"""Does to the model's values what the source of blocks says (`known_edits.py`).

In a step with one token of each request, most edits are done to the rows of all requests at once: those whose
operations take each element by itself. The others, and those of prompts, are done request by request, on the rows
that the request's block would be served.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from tracewire_bus.wire.packing import unpack
from tracewire_engine.protocol.known_edits import Edit, Operation
from tracewire_engine.worker.tensors import to_tensors

__all__ = ["OPERATIONS", "EditRuns", "UnfitLeaf", "UnfitValue", "leaves_of"]

#: The largest variable that an edit takes, in elements.
_MOST_ELEMENTS = 1 << 16

#: How many tensors of variables are kept on the device when no request has them.
_KEPT = 1024


class UnfitLeaf(ValueError):
    """A variable of a block is no number and no vector, so that an edit with it is left to the block."""


class UnfitValue(ValueError):
    """A value of the model has no row for each token, or each request."""


def _places(given: tuple[Any, ...]) -> Any:
    return given[0] if len(given) == 1 else given


def _getitem(value: Any, *places: Any) -> Any:
    return value[_places(places)]


def _setitem(target: torch.Tensor, value: Any, *places: Any) -> torch.Tensor:
    target[_places(places)] = value
    return target


def _stream(value: Any, *, sums: bool) -> torch.Tensor:
    # As `ResidualReads.read`.
    hidden, residual = _halves(value, sums=sums)
    return hidden.clone() if residual is None else hidden + residual


def _put_stream(value: Any, stream: torch.Tensor, *, sums: bool) -> None:
    # As `ResidualReads._write`.
    hidden, residual = _halves(value, sums=sums)
    hidden[:] = stream
    if residual is not None:
        residual.zero_()


def _halves(value: Any, *, sums: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(value, tuple):
        return value[0], value[1] if len(value) > 1 and sums else None
    return value, None


def _method(name: str) -> Callable[..., Any]:
    return lambda value, *arguments, **options: getattr(value, name)(*arguments, **options)


_BINARY = ("add", "sub", "mul", "truediv", "matmul")

#: Operations that take each element by itself, and come to the same bits whatever lies beside it.
_BY_ELEMENT = frozenset(
    {"abs", "bfloat16", "clamp", "clone", "contiguous", "detach", "double", "float", "half", "neg", "relu", "to"}
    | {"add", "sub", "mul", "truediv", "iadd", "isub", "imul", "itruediv", "setitem", "getitem", "attribute"}
    | {"add_", "clamp_", "copy_", "div_", "fill_", "mul_", "neg_", "relu_", "sub_", "zero_", "stream", "put_stream"}
    | {"type_as"}
)

#: By the name of an operation, what does it.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "getitem": _getitem,
    "setitem": _setitem,
    "attribute": getattr,
    "stream": _stream,
    "put_stream": _put_stream,
    **{name: getattr(operator, name) for name in (*_BINARY, "neg")},
    **{f"i{name}": getattr(operator, f"i{name}") for name in _BINARY},
    **{
        name: _method(name)
        for name in (
            *("abs", "bfloat16", "clamp", "clone", "contiguous", "detach", "double", "exp", "float", "half", "mean"),
            *("norm", "relu", "rsqrt", "sigmoid", "sign", "sqrt", "square", "sum", "tanh", "to", "type_as"),
            *("unsqueeze", "add_", "clamp_", "copy_", "div_", "fill_", "mul_", "neg_", "relu_", "sub_", "zero_"),
        )
    },
}


def leaves_of(variables: bytes, edits: Iterable[Edit]) -> list[Any]:
    """The values of the leaves of all of these edits, one after the other: numbers, and arrays of NumPy.

    Args:
        variables: of the block (`Block.variables`).
        edits: of the block.

    Raises:
        UnfitLeaf: one of them is neither a number nor a vector of numbers.
    """
    wanted = [leaf for edit in edits for leaf in edit.leaves]
    if not wanted:
        return []
    found, held = [], unpack(variables)
    for name, *keys in wanted:
        value = held[name]
        try:
            for key in keys:
                value = value[key]
        except (LookupError, TypeError):
            raise UnfitLeaf from None
        value = np.asarray(value) if isinstance(value, np.generic) else value
        fits = isinstance(value, np.ndarray) and value.ndim <= 1 and value.size <= _MOST_ELEMENTS
        if not isinstance(value, int | float) and not (fits and value.dtype.kind in "fV"):
            raise UnfitLeaf
        found.append(value)
    return found


class _Step(NamedTuple):
    """An operation: what does it, its arguments and its options, and whether nothing of the model is in its result.

    An argument is whether it is a register, and the register's number or the argument itself.
    """

    does: Callable[..., Any]
    arguments: list[tuple[bool, Any]]
    options: dict[str, Any]
    registers: dict[str, int]
    constant: bool


class _Program:
    """The operations of an edit.

    Args:
        edit: what is done.
        leaves: the values of its leaves, on the device.
        sums: as `TracedModel` has it.
        together: whether it is done to the rows of several requests at once (see `_is_by_row`).
        whole: if so, whether the location's value is a tensor and not a tuple.
    """

    def __init__(
        self, edit: Edit, leaves: Sequence[Any], *, sums: bool, together: bool = False, whole: bool = False
    ) -> None:
        self._steps: list[_Step] = []
        self._kept: dict[int, Any] = {}
        constants: set[int] = set()
        bases = _bases(edit, whole=whole) if together else frozenset[int]()
        for number, one in enumerate(edit.operations, 1):
            given = one.arguments
            if together and one.name in ("getitem", "setitem") and given[0][1] in bases and number not in bases:
                place = 1 if one.name == "getitem" else 2
                given = [*given[:place], ["s", None, None, None], *given[place + 1 :]]
            arguments = [_argument(argument, leaves) for argument in given]
            options = {key: _argument(argument, leaves) for key, argument in one.options.items()}
            registers = [value for is_register, value in [*arguments, *options.values()] if is_register]
            constant = one.name == "attribute" or constants.issuperset(registers)
            if constant:
                constants.add(number)
            fixed = {key: value for key, (is_register, value) in options.items() if not is_register}
            if one.name in ("stream", "put_stream"):
                fixed["sums"] = sums
            named = {key: value for key, (is_register, value) in options.items() if is_register}
            self._steps.append(_Step(OPERATIONS[one.name], arguments, fixed, named, constant))

    def run(self, value: Any) -> None:
        """Do it to a value: to a request's rows, or to those of several."""
        registers = [value]
        for number, (does, arguments, options, named, constant) in enumerate(self._steps, 1):
            # What is nothing of the model's has its form, which is the same in each step.
            if constant and number in self._kept:
                registers.append(self._kept[number])
                continue
            given = [registers[one] if is_register else one for is_register, one in arguments]
            if named:
                options = {**options, **{key: registers[one] for key, one in named.items()}}
            registers.append(does(*given, **options))
            if constant:
                self._kept[number] = registers[-1]


def _argument(argument: Any, leaves: Sequence[Any]) -> tuple[bool, Any]:
    """An argument of an operation: whether it is a register, and that or its value."""
    match argument:
        case ["r", number]:
            return True, number
        case ["v", leaf]:
            return False, leaves[leaf]
        case ["d", name]:
            return False, getattr(torch, name)
        case ["s", start, stop, step]:
            return False, slice(start, stop, step)
        case ["e"]:
            return False, Ellipsis
        case ["n"]:
            return False, None
    return False, argument


def _bases(edit: Edit, *, whole: bool) -> frozenset[int]:
    """The registers that are tensors of the model's value, of which each row is a token's.

    Args:
        edit: what is done.
        whole: whether the location's value is such a tensor, and not a tuple of them.
    """
    found = {0} if whole else set()
    for number, one in enumerate(edit.operations, 1):
        if one.name == "stream" or (not whole and _item_of(one) is not None):
            found.add(number)
    return frozenset(found)


def _item_of(operation: Operation) -> int | None:
    """Which item of the location's value an operation takes, if it takes one."""
    name, given = operation.name, operation.arguments
    fits = name == "getitem" and len(given) == 2 and given[0] == ["r", 0] and type(given[1]) is int
    return given[1] if fits else None


def _items(edit: Edit, *, whole: bool) -> frozenset[int] | None:
    """The items of the location's value that an edit uses; `None` for all."""
    if whole or any(one.name in ("stream", "put_stream") for one in edit.operations):
        return None
    found = [_item_of(one) for one in edit.operations]
    return frozenset([one for one in found if one is not None])


def _is_by_row(edit: Edit, leaves: Sequence[Any], *, whole: bool) -> bool:
    """Whether an edit of requests with one row each can be done to the rows of all of them at once."""
    bases = _bases(edit, whole=whole)
    vectors = any(isinstance(one, np.ndarray) and one.ndim for one in leaves)
    columns: list[Any] = []
    several = False
    for number, one in enumerate(edit.operations, 1):
        of_tensor = one.arguments[0] if one.arguments else None
        if one.name not in _BY_ELEMENT:
            return False
        if not whole and ["r", 0] in one.arguments and number not in bases and one.name != "put_stream":
            return False
        if one.name in ("getitem", "setitem") and number not in bases:
            places = one.arguments[1 if one.name == "getitem" else 2 :]
            if of_tensor is None or of_tensor[0] != "r" or of_tensor[1] not in bases or len(places) > 2:
                return False
            if not _takes_the_row(places[0]):
                return False
            columns += places[1:]
        if one.name not in ("getitem", "attribute"):
            several |= sum(isinstance(given, list) and given[0] == "r" for given in one.arguments) > 1
    if ["e"] in columns or ["n"] in columns or (columns and vectors):
        return False
    # One column of one row is a number, where one column of several rows is not.
    return not several or not any(isinstance(place, int) for place in columns)


def _takes_the_row(place: Any) -> bool:
    """Whether what stands in brackets first takes the only row of a tensor."""
    if isinstance(place, int):
        return place in (0, -1)
    return place == ["e"] or (place[0] == "s" and len(range(*slice(*place[1:]).indices(1))) == 1)


class _Row(NamedTuple):
    """The rows of a request in the step: the first one's index, how many, and its row where each request has one."""

    first: int
    tokens: int
    place: int


class _Request:
    """A request whose blocks' edits are known.

    Args:
        edits: of its block.
        leaves: the values of their leaves, as `leaves_of` returns them.
        device: where the model's values lie.
        kept: the tensors on the device, by what they are made of.
        sums: as `TracedModel` has it.
    """

    def __init__(
        self, edits: Sequence[Edit], leaves: Sequence[Any], device: torch.device, kept: _Tensors, *, sums: bool
    ) -> None:
        self.edits = {edit.location: edit for edit in edits}
        self.leaves: dict[str, list[Any]] = {}
        self.programs: dict[str, _Program] = {}
        self._keys: dict[tuple[str, bool], bytes | None] = {}
        #: In which of its steps it is; and whether its block has failed, as what it writes shows.
        self.step = -1
        self.failed = False
        self.bounds = {edit.first for edit in edits} | {edit.end for edit in edits if edit.end is not None}
        self.bounds.discard(0)
        rest = iter(leaves)
        for edit in edits:
            own = [next(rest) for _ in edit.leaves]
            self.leaves[edit.location] = own
            tensors = [kept.of(one, device) for one in own]
            self.programs[edit.location] = _Program(edit, tensors, sums=sums)

    def is_due(self, location: str) -> bool:
        """Whether its block changes something at a location in this step."""
        edit = self.edits.get(location)
        if edit is None or self.failed:
            return False
        return edit.first <= self.step and (edit.end is None or self.step < edit.end)

    def key(self, location: str, *, whole: bool) -> bytes | None:
        """What requests have in common whose edits are done at once; `None` if this one's is done by itself."""
        at = location, whole
        if at not in self._keys:
            edit, leaves = self.edits[location], self.leaves[location]
            forms = [
                (one.dtype.name, one.shape) if isinstance(one, np.ndarray) and one.ndim else _plain(one)
                for one in leaves
            ]
            by_row = _is_by_row(edit, leaves, whole=whole)
            self._keys[at] = _encode((edit.operations, forms)) if by_row else None
        return self._keys[at]


_encode = msgspec.msgpack.Encoder().encode


def _plain(leaf: Any) -> Any:
    return (leaf.dtype.name, leaf.tobytes()) if isinstance(leaf, np.ndarray) else leaf


class _Tensors:
    """Variables of blocks on the device, of which many requests have the same."""

    def __init__(self) -> None:
        self._of = lru_cache(_KEPT)(self._made)

    def of(self, leaf: Any, device: torch.device) -> Any:
        """The tensor of an array; a number as it is."""
        if not isinstance(leaf, np.ndarray):
            return leaf
        return self._of(leaf.dtype, leaf.shape, leaf.tobytes(), device)

    @staticmethod
    def _made(dtype: Any, shape: tuple[int, ...], data: bytes, device: torch.device) -> torch.Tensor:
        made = to_tensors(np.frombuffer(data, dtype).reshape(shape), torch.device("cpu"))
        assert isinstance(made, torch.Tensor)
        return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


class _Together(NamedTuple):
    """Requests with one row each, whose edits are done at once: what takes their rows out, and of which items."""

    names: list[str]
    program: _Program
    index: Any
    items: frozenset[int] | None


class EditRuns:
    """The edits of live requests, and where their rows lie in a step.

    Args:
        device: where the model's values lie.
        sums: as `TracedModel` has it.
    """

    def __init__(self, device: torch.device, *, sums: bool) -> None:
        self._device, self._sums, self._tensors = device, sums, _Tensors()
        self._requests: dict[str, _Request] = {}
        self._rows: dict[str, _Row] = {}
        self._present: list[str] = []
        self._total = self._count = 0
        #: By the location and the form of its value, what is done there in steps like this one.
        self._plans: dict[Any, tuple[list[_Together], list[tuple[str, _Row]]]] = {}
        self._layout: Any = None

    def open(self, request: str, edits: Sequence[Edit], leaves: Sequence[Any]) -> None:
        """Take a request with a block whose edits are known. `leaves` are as `leaves_of` returns them."""
        self._requests[request] = _Request(edits, leaves, self._device, self._tensors, sums=self._sums)
        self._layout = None

    def discard(self, request: str) -> None:
        """Forget a request."""
        if self._requests.pop(request, None) is not None:
            self._layout = None

    def rows_of(self, value: torch.Tensor, *, by_request: bool, over: Callable[[str], bool]) -> list[torch.Tensor]:
        """The rows of requests in a tensor, of those for which `over` says so."""
        rows = [row for name, row in self._rows.items() if over(name)]
        return [_served(value, row, self._total, self._count, by_request=by_request) for row in rows]

    def begin(self, layout: Any, spans: Callable[[], Iterable[tuple[str, int]]]) -> None:
        """Begin a step.

        Args:
            layout: the same object, or an equal one, in steps of the same requests with as many tokens.
            spans: the requests of the step and the number of tokens of each, in the order of the rows.
        """
        if layout != self._layout or self._layout is None:
            self._layout, self._rows, self._total, self._count = layout, {}, 0, 0
            self._plans.clear()
            for request, count in spans():
                if request in self._requests:
                    self._rows[request] = _Row(self._total, count, self._count)
                self._total += count
                self._count += 1
        for one in map(self._requests.__getitem__, self._rows):
            one.step += 1
            if one.step in one.bounds:
                self._plans.clear()

    def apply(self, location: str, value: Any, *, by_request: bool) -> bool:
        """Do what the blocks of the step's requests do at a location. Returns whether any does something.

        Args:
            location: where the model has reached the value.
            value: the model's: a tensor, or a tuple with some.
            by_request: whether each request has one row.

        Raises:
            UnfitValue: the value has no row for each token or request.
        """
        due = [name for name in self._rows if self._requests[name].is_due(location)]
        if not due:
            return False
        tensors = value if type(value) is tuple else (value,)
        form = tuple([one.shape[0] if isinstance(one, torch.Tensor) and one.ndim else -1 for one in tensors])
        plan = self._plans.get((location, form))
        if plan is None:
            plan = self._plans[location, form] = self._plan(due, location, value, form, by_request=by_request)
        together, alone = plan
        for group in together:
            try:
                _run_together(group, value)
            except Exception:  # the blocks raise the same
                self._fail(group.names)
        for name, row in alone:
            rows = _served(value, row, self._total, self._count, by_request=by_request)
            try:
                self._requests[name].programs[location].run(rows)
            except Exception:  # the block raises the same
                self._fail([name])
        return True

    def _fail(self, names: Iterable[str]) -> None:
        for name in names:
            self._requests[name].failed = True
        self._plans.clear()

    def _plan(
        self, due: list[str], location: str, value: Any, form: tuple[int, ...], *, by_request: bool
    ) -> tuple[list[_Together], list[tuple[str, _Row]]]:
        whole = type(value) is not tuple
        rows = self._count if by_request else self._total
        groups: dict[bytes, list[str]] = {}
        alone = []
        for name in due:
            request, row = self._requests[name], self._rows[name]
            fits = (by_request or row.tokens == 1) and all(one == rows for one in form if one >= 0)
            key = request.key(location, whole=whole) if fits else None
            if key is None:
                alone.append((name, row))
            else:
                groups.setdefault(key, []).append(name)
        return [self._joined(names, location, whole=whole, by_request=by_request) for names in groups.values()], alone

    def _joined(self, names: list[str], location: str, *, whole: bool, by_request: bool) -> _Together:
        """The edits of some requests, as one."""
        first = self._requests[names[0]]
        held = [self._requests[name].leaves[location] for name in names]
        leaves = [self._stacked([one[place] for one in held]) for place in range(len(held[0]))]
        rows = [self._rows[name].place if by_request else self._rows[name].first for name in names]
        program = _Program(first.edits[location], leaves, sums=self._sums, together=True, whole=whole)
        index: Any = slice(rows[0], rows[0] + len(rows))
        if rows != list(range(index.start, index.stop)):
            index = torch.tensor(rows)
            if self._device.type == "cuda":
                index = index.pin_memory().to(self._device, non_blocking=True)
        return _Together(names, program, index, _items(first.edits[location], whole=whole))

    def _stacked(self, leaves: list[Any]) -> Any:
        """One leaf of several requests: a row for each, unless all have the same."""
        tensors = [self._tensors.of(one, self._device) for one in leaves]
        first = tensors[0]
        if not isinstance(first, torch.Tensor) or not first.ndim or all(one is first for one in tensors):
            return first
        return torch.stack(tensors)


def _run_together(group: _Together, value: Any) -> None:
    _, program, index, items = group
    tensors = value if type(value) is tuple else (value,)
    used = [at for at in range(len(tensors)) if items is None or at in items or at - len(tensors) in items]
    rows: list[Any] = [None] * len(tensors)
    for at in used:
        one = tensors[at]
        rows[at] = one[index] if isinstance(one, torch.Tensor) and one.ndim else one
    program.run(tuple(rows) if type(value) is tuple else rows[0])
    if not isinstance(index, slice):
        for at in used:
            if isinstance(tensors[at], torch.Tensor) and tensors[at].ndim:
                tensors[at][index] = rows[at]


def _served(value: Any, row: _Row, total: int, count: int, *, by_request: bool) -> Any:
    """The rows of a request's block in a value; of a tensor without such rows, a copy that nothing else sees."""
    if type(value) is tuple:
        return tuple([_served(one, row, total, count, by_request=by_request) for one in value])
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return value.clone() if isinstance(value, torch.Tensor) else value
    if value.shape[0] == (count if by_request else total):
        return value.narrow(0, row.place, 1) if by_request else value.narrow(0, row.first, row.tokens)
    if value.shape[0] == count or (value.ndim > 1 and value.shape[0] == 1 and value.shape[1] == total):
        raise UnfitValue(f"a value of shape {list(value.shape)} in a step of {total} tokens of {count} requests")
    return value.clone()
