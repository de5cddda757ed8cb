"""Does to the model's values what the source of blocks says (`known_edits.py`).

In a step with one token of each request, most edits are done to the rows of all requests at once: those whose
operations take each element by itself. The others, and those of prompts, are done request by request, on the rows
that the request's block would be served.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from nnsight.util import apply

from tracewire_bus.wire.packing import unpack
from tracewire_engine.protocol.known_edits import LIVE_LEAF, Edit, Operation
from tracewire_engine.worker.blocks.live_params import LiveRun
from tracewire_engine.worker.tensors import to_tensors

from .edit_forms import bases_of, is_by_row, is_exact, items_of
from .edit_symbols import IN_PLACE, LOGITS, METHODS, OPERATORS

__all__ = ["MOST_HELD", "OPERATIONS", "EditRuns", "UnfitLeaf", "UnfitValue", "check_growth", "held_by", "leaves_of"]

#: The largest variable that an edit takes, in elements: of logits, and of other values.
_MOST_LOGITS, _MOST_ELEMENTS = 1 << 18, 1 << 14

#: What is no error of a block.
_MEMORY = (MemoryError, torch.OutOfMemoryError)

#: How many bytes the edits of all requests may hold on the device; and how many tensors of variables are kept there
#: when no request has them.
MOST_HELD, _KEPT = 1 << 30, 64


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


def _unpack(value: Any, items: int) -> None:
    if len(value) != items:
        raise ValueError("another number of items")


def _stream(value: Any, *, sums: bool) -> torch.Tensor:
    # As `ResidualReads.read`.
    hidden, residual = _halves(value, sums=sums)
    return hidden.clone() if residual is None else hidden + residual


def _put_stream(value: Any, stream: torch.Tensor, *, sums: bool) -> None:
    # As `ResidualReads._write`.
    hidden, residual = _halves(value, sums=sums)
    if stream.shape != hidden.shape:
        raise ValueError("a residual stream of another shape")
    hidden[:] = stream
    if residual is not None:
        residual.zero_()


def _halves(value: Any, *, sums: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(value, tuple):
        return value[0], value[1] if len(value) > 1 and sums else None
    return value, None


def _method(name: str) -> Callable[..., Any]:
    return lambda value, *arguments, **options: getattr(value, name)(*arguments, **options)


#: By the name of an operation, what does it.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "getitem": _getitem,
    "setitem": _setitem,
    "attribute": getattr,
    "unpack": _unpack,
    "stream": _stream,
    "put_stream": _put_stream,
    **{name: _method(name) for name in METHODS | IN_PLACE},
    # Of a number, too.
    **{name: getattr(operator, name) for name in (*OPERATORS.values(), "neg")},
    **{f"i{name}": getattr(operator, f"i{name}") for name in OPERATORS.values()},
}


def leaves_of(variables: bytes, edits: Iterable[Edit], live: Mapping[str, Any] = MappingProxyType({})) -> list[Any]:
    """The values of the leaves of all of these edits, one after the other: numbers, and arrays of NumPy.

    Args:
        variables: of the block (`Block.variables`).
        edits: of the block.
        live: the values of its live parameters, by name.

    Raises:
        UnfitLeaf: one of them is neither a number nor a vector of numbers.
    """
    wanted = [(edit.location, leaf) for edit in edits for leaf in edit.leaves]
    if not wanted:
        return []
    found, held = [], {**unpack(variables), LIVE_LEAF: live}
    for location, (name, *keys) in wanted:
        most = _MOST_LOGITS if location == LOGITS else _MOST_ELEMENTS
        value = held[name]
        try:
            for key in keys:
                value = value[key]
        except (LookupError, TypeError):
            raise UnfitLeaf from None
        value = np.asarray(value) if isinstance(value, np.generic) else value
        fits = isinstance(value, np.ndarray) and value.ndim <= 1 and value.size <= most
        if not isinstance(value, int | float) and not (fits and value.dtype.kind in "fV"):
            raise UnfitLeaf
        found.append(value)
    return found


def held_by(edits: Sequence[Edit], leaves: Sequence[Any]) -> int:
    """How many bytes edits hold on the device at most: what they make of variables is made once.

    Args:
        edits: of a block.
        leaves: the values of their leaves, as `leaves_of` returns them.
    """
    rest, held = iter(leaves), 0
    for edit in edits:
        sizes = [one.nbytes if isinstance(one, np.ndarray) else 0 for one in (next(rest) for _ in edit.leaves)]
        # Twice: another dtype may be wider.
        held += sum(sizes) + 2 * max(sizes, default=0) * len(_constants(edit))
    return held


def _constants(edit: Edit) -> set[int]:
    """The registers whose values have nothing of the model's but its form."""
    found: set[int] = set()
    for number, one in enumerate(edit.operations, 1):
        if one.name == "attribute" or found.issuperset(one.registers):
            found.add(number)
    return found


def check_growth(edit: Edit, leaves: Sequence[Any]) -> None:
    """Check that an edit makes no value much larger than those that it is given.

    Raises:
        UnfitLeaf: it may.
    """
    names = [one.name for one in edit.operations]
    if "unsqueeze" not in names and not any(["n"] in one.arguments for one in edit.operations):
        return
    # A further axis is one behind a number of each row then.
    if not any(is_by_row(edit, leaves, whole=whole) for whole in (False, True)):
        raise UnfitLeaf


def _row_dot(rows: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """The product of each row with its own vector, or of all with one."""
    return rows @ vectors if vectors.ndim == 1 else torch.linalg.vecdot(rows, vectors)


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
        bases: if it is done to rows of several requests at once, the tensors of the model's value (see `bases_of`).
    """

    def __init__(self, edit: Edit, leaves: Sequence[Any], *, sums: bool, bases: frozenset[int] | None = None) -> None:
        self._steps: list[_Step] = []
        #: What nothing of the model is in but its form, by the register.
        self.kept: dict[int, Any] = {}
        constants = _constants(edit)
        for number, one in enumerate(edit.operations, 1):
            given, does = one.arguments, OPERATIONS[one.name]
            if bases is not None and one.name in ("getitem", "setitem") and number not in bases:
                given = _of_all_rows(one, bases)
            elif bases is not None and one.name == "matmul":
                does = _row_dot
            arguments = [_argument(argument, leaves) for argument in given]
            options = {key: _argument(argument, leaves) for key, argument in one.options.items()}
            fixed = {key: value for key, (is_register, value) in options.items() if not is_register}
            if one.name in ("stream", "put_stream"):
                fixed["sums"] = sums
            named = {key: value for key, (is_register, value) in options.items() if is_register}
            self._steps.append(_Step(does, arguments, fixed, named, number in constants))

    @property
    def used(self) -> list[int]:
        """The registers without anything of the model's that operations on the model's values take."""
        taken = [step for step in self._steps if not step.constant]
        wanted = {one for step in taken for is_register, one in step.arguments if is_register}
        wanted |= {one for step in taken for one in step.registers.values()}
        return [number for number, step in enumerate(self._steps, 1) if step.constant and number in wanted]

    def run(self, value: Any) -> None:
        """Do it to a value: to a request's rows, or to those of several."""
        registers = [value]
        for number, (does, arguments, options, named, constant) in enumerate(self._steps, 1):
            # The model's value has the same form in each step.
            if constant and number in self.kept:
                registers.append(self.kept[number])
                continue
            given = [registers[one] if is_register else one for is_register, one in arguments]
            if named:
                options = {**options, **{key: registers[one] for key, one in named.items()}}
            registers.append(does(*given, **options))
            if constant:
                self.kept[number] = registers[-1]


def _of_all_rows(one: Operation, bases: frozenset[int]) -> list[Any]:
    """The arguments of an operation, where what it takes of a tensor's only row it takes of each row."""
    given, place = one.arguments, 1 if one.name == "getitem" else 2
    if given[0][0] != "r" or given[0][1] not in bases:
        return given
    return [*given[:place], ["s", None, None, None], *given[place + 1 :]]


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
        live: the live parameters of its run.
        device: where the model's values lie.
        kept: the tensors on the device, by what they are made of.
        sums: as `TracedModel` has it.
    """

    def __init__(
        self,
        edits: Sequence[Edit],
        leaves: Sequence[Any],
        live: LiveRun,
        device: torch.device,
        kept: _Tensors,
        *,
        sums: bool,
    ) -> None:
        self._live, self._device, self._kept, self._sums = live, device, kept, sums
        self.edits = {edit.location: edit for edit in edits}
        #: The locations whose edits depend on live parameters; and the values of these with which they were made.
        self._steered = [edit.location for edit in edits if any(leaf[0] == LIVE_LEAF for leaf in edit.leaves)]
        self._values = live.values
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
            self._make(edit, [next(rest) for _ in edit.leaves])

    def _make(self, edit: Edit, leaves: list[Any]) -> None:
        self.leaves[edit.location] = leaves
        tensors = [self._kept.of(one, self._device) for one in leaves]
        self.programs[edit.location] = _Program(edit, tensors, sums=self._sums)

    def begin_step(self) -> bool:
        """Begin its next step. Returns whether its block does something else in it than in the step before."""
        self.step += 1
        changed = self.step in self.bounds
        if self._steered and self._live.values is not self._values:
            self._values = self._live.values
            for location in self._steered:
                edit, leaves = self.edits[location], self.leaves[location]
                pairs = zip(edit.leaves, leaves, strict=True)
                self._make(edit, [self._values[leaf[1]] if leaf[0] == LIVE_LEAF else one for leaf, one in pairs])
                for whole in (False, True):
                    self._keys.pop((location, whole), None)
            changed = True
        return changed

    def is_due(self, location: str) -> bool:
        """Whether its block changes something at a location in this step."""
        edit = self.edits.get(location)
        if edit is None or self.failed:
            return False
        return edit.first <= self.step and (edit.end is None or self.step < edit.end)

    def key(self, location: str, *, whole: bool, exact: bool) -> bytes | None:
        """What requests have in common whose edits are done at once; `None` if this one's is done by itself.

        Args:
            location: of the edit.
            whole: as for `is_by_row`.
            exact: whether each row must come to the same bits as by itself.
        """
        at = location, whole
        if at not in self._keys:
            edit, leaves = self.edits[location], self.leaves[location]
            # A number that only makes constants may be another one for each request.
            taken = _leaves_beside_constants(edit)
            forms = [_form_of(one) if place in taken else _kind_of(one) for place, one in enumerate(leaves)]
            fits = (is_exact(edit) or not exact) and is_by_row(edit, leaves, whole=whole)
            self._keys[at] = _encode((edit.operations, forms)) if fits else None
        return self._keys[at]

    def constants(self, location: str, rows: Any) -> dict[int, Any]:
        """What its edit finds of nothing but variables, by the register. `rows` are its block's."""
        program = self.programs[location]
        if not program.kept:
            program.run(apply(rows, torch.Tensor.clone, torch.Tensor))
        return program.kept


_encode = msgspec.msgpack.Encoder().encode


def _form_of(leaf: Any) -> Any:
    """What the leaves of requests have in common whose edits are done at once."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    return leaf.dtype.name, leaf.shape if leaf.ndim else leaf.tobytes()


def _kind_of(leaf: Any) -> Any:
    """The same, where only operations without anything of the model's take the leaf."""
    return _form_of(leaf) if isinstance(leaf, np.ndarray) else type(leaf).__name__


def _leaves_beside_constants(edit: Edit) -> set[int]:
    """The places of the leaves that operations on the model's values take."""
    constants = _constants(edit)
    taken = [one for number, one in enumerate(edit.operations, 1) if number not in constants]
    given = [argument for one in taken for argument in (*one.arguments, *one.options.values())]
    return {one[1] for one in given if isinstance(one, list) and one[0] == "v"}


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
        exact: whether all must come to the same bits as in the blocks.
    """

    def __init__(self, device: torch.device, *, sums: bool, exact: bool = True) -> None:
        self._device, self._sums, self._exact, self._tensors = device, sums, exact, _Tensors()
        self._requests: dict[str, _Request] = {}
        self._failed: list[str] = []
        self._held: dict[str, int] = {}
        self._rows: dict[str, _Row] = {}
        self._total = self._count = 0
        #: By the location and the form of its value, what is done there in steps like this one.
        self._plans: dict[Any, tuple[list[_Together], list[str]]] = {}
        self._layout: Any = None

    @property
    def room(self) -> int:
        """How many more bytes edits may hold."""
        return MOST_HELD - sum(self._held.values())

    def open(self, request: str, edits: Sequence[Edit], leaves: Sequence[Any], live: LiveRun) -> None:
        """Take a request with a block whose edits are known.

        Args:
            request: its name.
            edits: of its block.
            leaves: as `leaves_of` returns them.
            live: the live parameters of its run, whose values may change between two steps.
        """
        self._held[request] = held_by(edits, leaves)
        self._requests[request] = _Request(edits, leaves, live, self._device, self._tensors, sums=self._sums)
        self._layout = None

    def discard(self, request: str) -> None:
        """Forget a request."""
        self._held.pop(request, None)
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
            if one.begin_step():
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
        if not self._rows:
            return False
        tensors = value if type(value) is tuple else (value,)
        form = tuple([(one.ndim, *one.shape[:1]) if isinstance(one, torch.Tensor) else () for one in tensors])
        plan = self._plans.get((location, form))
        if plan is None:
            plan = self._plans[location, form] = self._plan(location, value, form, by_request=by_request)
        together, alone = plan
        for group in together:
            try:
                _run_together(group, value)
            except _MEMORY:
                raise
            except Exception:  # the blocks raise the same
                self._fail(group.names)
        for name in alone:
            rows = self._served(value, name, by_request=by_request)
            try:
                self._requests[name].programs[location].run(rows)
            except _MEMORY:
                raise
            except Exception:  # the block raises the same
                self._fail([name])
        return bool(together or alone)

    def due(self, location: str) -> list[str]:
        """The requests of the step whose blocks do something at a location."""
        return [name for name in self._rows if self._requests[name].is_due(location)]

    def take_failed(self) -> list[str]:
        """The requests whose blocks must have failed since the last call, as what they write shows."""
        failed, self._failed = self._failed, []
        return failed

    def _fail(self, names: Iterable[str]) -> None:
        for name in names:
            self._requests[name].failed = True
            self._failed.append(name)
        self._plans.clear()

    def _plan(
        self, location: str, value: Any, form: tuple[tuple[int, ...], ...], *, by_request: bool
    ) -> tuple[list[_Together], list[str]]:
        whole = type(value) is not tuple
        rows = self._count if by_request else self._total
        groups: dict[bytes, list[str]] = {}
        alone = []
        apart = all(one in ((), (2, rows)) for one in form) and _are_apart(value)
        for name in self.due(location):
            request, row = self._requests[name], self._rows[name]
            fits = apart and (by_request or row.tokens == 1)
            key = request.key(location, whole=whole, exact=self._exact) if fits else None
            if key is None:
                alone.append(name)
            else:
                groups.setdefault(key, []).append(name)
        together = []
        for names in groups.values():
            joined = self._joined(names, location, value, by_request=by_request)
            if joined is None:
                alone += names
            else:
                together.append(joined)
        return together, alone

    def _joined(self, names: list[str], location: str, value: Any, *, by_request: bool) -> _Together | None:
        """The edits of some requests, as one; `None` if they must be done one by one."""
        requests = [self._requests[name] for name in names]
        edit, whole = requests[0].edits[location], type(value) is not tuple
        held = [[self._tensors.of(one, self._device) for one in request.leaves[location]] for request in requests]
        leaves = [_joined_constant(list(some)) for some in zip(*held, strict=True)]
        program = _Program(edit, leaves, sums=self._sums, bases=bases_of(edit, whole=whole))
        if any(one is not held[0][place] for place, one in enumerate(leaves)):
            served = [self._served(value, name, by_request=by_request) for name in names]
            try:
                found = [request.constants(location, rows) for request, rows in zip(requests, served, strict=True)]
            except Exception:  # of a block that raises the same
                return None
            program.kept = {number: _joined_constant([one[number] for one in found]) for number in found[0]}
            if any(program.kept[number] is None for number in program.used):
                return None
        rows = [self._rows[name].place if by_request else self._rows[name].first for name in names]
        index: Any = slice(rows[0], rows[0] + len(rows))
        if rows != list(range(index.start, index.stop)):
            index = torch.tensor(rows)
            if self._device.type == "cuda":
                index = index.pin_memory().to(self._device, non_blocking=True)
        return _Together(names, program, index, items_of(edit, whole=whole))

    def _served(self, value: Any, name: str, *, by_request: bool) -> Any:
        return _served(value, self._rows[name], self._total, self._count, by_request=by_request)


def _joined_constant(values: list[Any]) -> Any:
    """What several requests have, as one: a row for each, unless all have the same; `None` if that is not one."""
    first = values[0]
    if all(one is first for one in values):
        return first
    if isinstance(first, torch.Tensor) and first.ndim == 1:
        return torch.stack(values)
    return first if not isinstance(first, torch.Tensor) and all(one == first for one in values) else None


def _are_apart(value: Any) -> bool:
    """Whether the tensors of a value share no memory."""
    tensors = [one for one in (value if type(value) is tuple else (value,)) if isinstance(one, torch.Tensor)]
    return len({one.untyped_storage().data_ptr() for one in tensors}) == len(tensors)


def _run_together(group: _Together, value: Any) -> None:
    _, program, index, items = group
    tensors = value if type(value) is tuple else (value,)
    used = [at for at in range(len(tensors)) if items is None or at in items or at - len(tensors) in items]
    rows: list[Any] = [None] * len(tensors)
    for at in used:
        one = tensors[at]
        rows[at] = one[index] if isinstance(one, torch.Tensor) and one.ndim else one
    try:
        program.run(tuple(rows) if type(value) is tuple else rows[0])
    finally:
        # Also what was done before an operation that failed.
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
