"""A trace's rows of a value that the model has reached, and what its blocks leave in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from nnsight.intervention.source import NO_SKIP
from nnsight.util import apply

from tracewire_engine.link.shared_rows import RowBytes, SharedValueError, pack_value, unpack_value
from tracewire_engine.protocol.block_host import Reply, Shape

__all__ = ["NoRoom", "SharedRows", "StepRows", "StepSpans", "Withheld", "joined"]


class NoRoom(BufferError):
    """The host has not read enough of what was shared before."""


class StepSpans(NamedTuple):
    """The arguments of a `StepRows`."""

    spans: list[tuple[int, int]]
    places: list[int]
    total: int
    requests: int


class StepRows:
    """Where the rows of a trace's requests lie in the step: each span a first row and a number of rows."""

    def __init__(self, spans: Sequence[tuple[int, int]], places: Sequence[int], total: int, requests: int) -> None:
        self._tokens, self._total = joined(spans), total
        self._requests, self._count = joined([(place, 1) for place in places]), requests
        self._counts: dict[bool, int] = {}
        self._indices: dict[tuple[int, bool], Any] = {}
        #: The arguments, with which another rank makes the same.
        self.given = StepSpans(list(spans), list(places), total, requests)

    def of(self, tensor: torch.Tensor, *, by_request: bool) -> tuple[int, list[tuple[int, int]]] | None:
        """The axis and the spans of the trace's rows; `None` if the tensor has no rows of requests."""
        place = self.place_of(tensor, by_request=by_request)
        return None if place is None else (place[0], self.spans(by_request=place[1]))

    def place_of(self, tensor: torch.Tensor, *, by_request: bool) -> tuple[int, bool] | None:
        """The axis of the rows, and whether each request has one; `None` if the tensor has no rows of requests."""
        if not tensor.ndim:
            return None
        first = tensor.shape[0]
        if first == self._total and not by_request:
            return 0, False
        # Of a prompt's tokens the head is given only the last.
        if first == self._count:
            return 0, True
        if tensor.ndim >= 2 and first == 1 and tensor.shape[1] == self._total and not by_request:
            return 1, False
        return None

    def spans(self, *, by_request: bool) -> list[tuple[int, int]]:
        """The first row and the number of rows of each piece, by their order."""
        return self._requests if by_request else self._tokens

    def count(self, *, by_request: bool) -> int:
        """How many rows the trace has."""
        if by_request not in self._counts:
            self._counts[by_request] = sum([size for _, size in self.spans(by_request=by_request)])
        return self._counts[by_request]

    def bounds(self, *, by_request: bool) -> tuple[int, int]:
        """Its first row, and the one behind its last."""
        spans = self.spans(by_request=by_request)
        return spans[0][0], sum(spans[-1])

    def index(self, first: int, *, by_request: bool) -> Any:
        """What takes the trace's rows out of an array whose first row is `first`."""
        key = first, by_request
        if key not in self._indices:
            spans = self.spans(by_request=by_request)
            if len(spans) == 1:
                self._indices[key] = slice(spans[0][0] - first, sum(spans[0]) - first)
            else:
                self._indices[key] = np.concatenate([np.arange(start, start + size) for start, size in spans]) - first
        return self._indices[key]


def joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same rows in fewer spans: those that follow one another are one."""
    found: list[tuple[int, int]] = []
    first = end = -1
    for start, size in spans:
        if start != end:
            if end >= 0:
                found.append((first, end - first))
            first = start
        end = start + size
    return [*found, (first, end - first)] if end >= 0 else found


class Withheld:
    """Stands for a tensor that is not shared."""


class SharedRows:
    """A value that the model has reached, of which one trace's host has rows.

    Args:
        value: the model's.
        rows: where the host's rows lie.
        by_request: as in `Reached`.
        rows_only: whether tensors without rows were withheld (see `StagedStep.reach`).

    Raises:
        SharedValueError: the value cannot be shared.
    """

    def __init__(self, value: Any, rows: StepRows, *, by_request: bool, rows_only: bool = False) -> None:
        self.rows, self._by_request = rows, by_request
        self.tensors: list[torch.Tensor] = []
        self._others: list[Any] = []
        given = apply(value, self._with_rows, torch.Tensor) if rows_only else value
        self._shapes: list[Shape] = pack_value(given, self._note, self._other).tensors

    def _with_rows(self, tensor: torch.Tensor) -> Any:
        has_rows = self.rows.place_of(tensor, by_request=self._by_request) is not None
        return tensor if has_rows else Withheld()

    def _note(self, tensor: torch.Tensor) -> Shape:
        self.tensors.append(tensor)
        return Shape(str(tensor.dtype).removeprefix("torch."), tuple(self._shape_of(tensor)), 0)

    def _shape_of(self, tensor: torch.Tensor) -> list[int]:
        """The shape of the host's rows of a tensor."""
        shape = list(tensor.shape)
        place = self.rows.place_of(tensor, by_request=self._by_request)
        if place is not None:
            shape[place[0]] = self.rows.count(by_request=place[1])
        return shape

    def _other(self, value: Any) -> Any:
        if value is NO_SKIP:
            return None
        self._others.append(value)
        return [len(self._others) - 1, type(value).__name__]

    # --- what the blocks leave ----------------------------------------------------------------------------------------

    def check_edits(self, reply: Reply, memory: RowBytes) -> None:
        """Check the rows that blocks have changed in place.

        Raises:
            SharedValueError: the host has sent rows that do not fit.
        """
        shapes = [shape for _, shape in reply.edited]
        if len({index for index, _ in reply.edited}) < len(shapes):
            raise SharedValueError("a tensor was changed twice")
        memory.check_apart([*shapes, *(reply.replaced.tensors if reply.replaced is not None else ())])
        for index, shape in reply.edited:
            if not 0 <= index < len(self.tensors):
                raise SharedValueError(f"the value has no tensor {index}")
            wanted = self._shapes[index]
            if (shape.dtype, tuple(shape.shape)) != (wanted.dtype, wanted.shape):
                raise SharedValueError(f"rows of {wanted.shape} are replaced by {shape.shape}")
            memory.check(shape)

    def place_of(self, tensor: torch.Tensor) -> tuple[int, bool] | None:
        """As `StepRows.place_of` for this value."""
        return self.rows.place_of(tensor, by_request=self._by_request)

    def replace(self, value: Any, reply: Reply, memory: RowBytes, fresh: dict[int, torch.Tensor]) -> Any:
        """The model's value with the rows that blocks have assigned.

        Args:
            value: the model's, perhaps with the rows that other traces have assigned.
            reply: the host's.
            memory: into which the host has written, or a copy of what it has written.
            fresh: tensors that were made for replacements at this location, by `id`. It is extended.

        Raises:
            SharedValueError: the host has sent a value that does not fit.
        """
        assert reply.replaced is not None
        memory.check_apart(reply.replaced.tensors)
        given = unpack_value(reply.replaced, lambda _, shape: memory.read(shape), self._others_at)
        return self._merged(value, given, fresh)

    def _others_at(self, given: Any) -> Any:
        if given is None:
            return NO_SKIP
        if isinstance(given, list) and len(given) == 1 and type(given[0]) is int and 0 <= given[0] < len(self._others):
            return self._others[given[0]]
        raise SharedValueError("a value of the model that was not shared")

    def _merged(self, value: Any, given: Any, fresh: dict[int, torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            if self.rows.place_of(value, by_request=self._by_request) is None:
                return value
            if not isinstance(given, torch.Tensor):
                raise SharedValueError(f"a tensor is replaced by {type(given).__name__}")
            shape = self._shape_of(value)
            if list(given.shape) != shape or given.dtype != value.dtype:
                raise SharedValueError(f"rows {tuple(shape)} of {value.dtype} are replaced by others")
            if id(value) not in fresh:
                value = value.clone()
                fresh[id(value)] = value
            self._put(value, given)
            return value
        if isinstance(value, tuple | list):
            if not isinstance(given, tuple | list) or len(given) != len(value):
                raise SharedValueError(f"a {type(value).__name__} of {len(value)} items is replaced by another value")
            return tuple([self._merged(one, other, fresh) for one, other in zip(value, given, strict=True)])
        if isinstance(value, dict):
            if not isinstance(given, dict) or given.keys() != value.keys():
                raise SharedValueError("a dict is replaced by one of other keys")
            return {key: self._merged(one, given[key], fresh) for key, one in value.items()}
        return value

    def _put(self, tensor: torch.Tensor, rows: torch.Tensor) -> None:
        place = self.rows.of(tensor, by_request=self._by_request)
        if place is None:
            # It belongs to no request, so no request's block may change it.
            return
        axis, spans = place
        first = 0
        for start, size in spans:
            tensor.narrow(axis, start, size).copy_(rows.narrow(axis, first, size))
            first += size
