"""Interventions of several requests that run together at one location, as a few kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch

from tracewire_bus.wire.messages import (
    Ablate,
    AttentionPattern,
    Clamp,
    Features,
    Hold,
    Lens,
    LogitLens,
    Probe,
    Reading,
    Steer,
)

from .conditions import RowCondition, Watch, filled, on_device
from .members import Member, Members
from .ops import Op

__all__ = [
    "Arrangement",
    "Collector",
    "EditGroup",
    "Group",
    "LocationValues",
    "ReadGroup",
    "ReadPart",
    "Results",
    "Rows",
    "along",
    "column",
    "project",
    "raw",
    "scored",
    "spread",
    "tensors_of",
]


class Rows:
    """Rows of the flat batch: of several requests, each with `counts[i]` of them from `starts[i]` on."""

    def __init__(self, spans: Sequence[tuple[int, int]], total: int, device: torch.device) -> None:
        self.counts = [count for _, count in spans]
        self.single = all(count == 1 for count in self.counts)
        #: Row numbers; `None` if they are all rows of the step.
        self.index: torch.Tensor | None = None
        self.total = total
        #: The request (the `id` of its declared interventions) and draft of each, if that is known.
        self.owners: tuple[tuple[int, int], ...] | None = None
        if self.single:
            rows = [row for row, _ in spans]
        else:
            rows = [row for start, count in spans for row in range(start, start + count)]
        self.numbers = np.array(rows, np.int64)
        #: What selects them in a NumPy array: all rows of the step are its beginning.
        self.where: np.ndarray[Any, Any] | slice = slice(0, total)
        if rows != list(range(total)):
            self.index, self.where = on_device(torch.tensor(rows, dtype=torch.int64), device), self.numbers

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """These rows of `tensor`; a view of it if they are all rows of the step."""
        return tensor[: self.total] if self.index is None else tensor.index_select(0, self.index)

    def put(self, tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace these rows by the result of `change`."""
        if self.index is None:
            view = tensor[: self.total]
            view.copy_(change(view))
        else:
            tensor.index_copy_(0, self.index, change(tensor.index_select(0, self.index)).to(tensor.dtype))


class Group:
    """Members that run together at one location. Their vectors are stacked, one a row where they differ.

    Attributes:
        condition: where the members' conditions hold, if they have any.
        watch: writes what depends on the numbers that the group reads.
        collector: takes what the group reads at place `site`, if it reads.
        location: where the group runs.
        device: where its tensors are.
    """

    #: Whether the members' vectors are the same, and not stacked.
    shares_vectors = False
    #: Whether it changes the values; and whether it does so head by head, each rank its own heads.
    edits = False
    by_head = False
    #: Whether it has the same rows in each step of a plan; and whether a CUDA graph can have its kernels.
    steady = True
    recordable = True
    condition: RowCondition | None = None
    watch: Watch | None = None
    collector: Collector | None = None
    site = 0
    location = ""

    def __init__(self, members: Members, rows: Rows, residual: bool, device: torch.device) -> None:
        self.members = members
        self.rows = rows
        self.residual = residual
        self.one: Any = members[0].op.one
        self.device = device

    # What follows is put on the device when it is first used: a step that whole graphs serve needs none of it.

    @cached_property
    def matrix(self) -> torch.Tensor | None:
        """The members' vectors."""
        return self._stacked(lambda op: op.matrix)

    @cached_property
    def bias(self) -> torch.Tensor | None:
        """What is added behind them."""
        return self._stacked(lambda op: op.bias)

    @cached_property
    def numbers(self) -> list[float | torch.Tensor]:
        """The members' numbers."""
        several, counts = self.members.distinct_ops(), self.rows.counts
        if len(several) == 1:
            return list(several[0].numbers)
        every = self.members.ops()
        return [
            spread([op.numbers[index] for op in every], counts, self.device) for index in range(len(every[0].numbers))
        ]

    def _stacked(self, tensor: Callable[[Op], torch.Tensor | None]) -> torch.Tensor | None:
        """A tensor of the members' interventions: one for all if they share it, else `[rows, ...]`."""
        several = self.members.distinct_ops()
        first = tensor(several[0])
        if first is None or self.shares_vectors or all(tensor(op) is first for op in several):
            return first
        pairs = zip(self.members.ops(), self.rows.counts, strict=True)
        found = [one for op, count in pairs if (one := tensor(op)) is not None for _ in range(count)]
        return torch.stack(found)

    def prepare(self) -> None:
        """Put it all on the device, as what records the group's kernels needs."""
        _ = self.matrix, self.bias, self.numbers

    def serve(self, location: LocationValues) -> None:
        """Read or edit the step's values, where the conditions hold. Raises before anything is written."""
        if self.condition is None:
            self.run(location)
        else:
            self.run_where(location, self.condition.mask())
        if self.watch is not None and self.collector is not None:
            found = self.collector.found[self.site]
            assert found is not None
            self.watch.write(found)

    def run(self, location: LocationValues) -> None:
        """Read or edit all rows of the group."""
        raise NotImplementedError

    def run_where(self, location: LocationValues, mask: torch.Tensor) -> None:
        """Read or edit the rows where `mask` `[rows]` is true."""
        if self.collector is not None:
            self.run(location)
            found = self.collector.found[self.site]
            assert found is not None
            self.collector.found[self.site] = filled(found, mask)
            return
        halves = location.halves(self.residual)
        before = [self.rows.take(half).clone() for half in halves]
        self.run(location)
        for half, old in zip(halves, before, strict=True):
            self.rows.put(half, lambda values, old=old: torch.where(mask.unsqueeze(-1), values, old))  # type: ignore[misc]


def spread(numbers: Sequence[float], counts: Sequence[int], device: torch.device) -> float | torch.Tensor:
    """The members' numbers: one for all if they share it, else `[rows]`."""
    if all(number == numbers[0] for number in numbers):
        return numbers[0]
    repeated = [number for number, count in zip(numbers, counts, strict=True) for _ in range(count)]
    return on_device(torch.tensor(repeated, dtype=torch.float32), device)


def project(values: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """`[rows, hidden]` on `[k, hidden]`, or on `[rows, k, hidden]` of its own for each row: `[rows, k]`."""
    if values.dim() != 2 or values.shape[-1] != matrix.shape[-1]:
        raise ValueError(f"a vector of {matrix.shape[-1]} does not fit values of shape {list(values.shape[1:])}")
    if matrix.dim() == 2:
        return values @ matrix.T
    return torch.linalg.vecdot(values.unsqueeze(1), matrix)


def along(coefficients: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """`[rows, k]` times `[k, hidden]` (or `[rows, k, hidden]`): `[rows, hidden]`."""
    if matrix.dim() == 2:
        return coefficients @ matrix
    return (coefficients.unsqueeze(-1) * matrix).sum(1)


class Collector:
    """The values of one read of some requests in a step, from all its locations."""

    def __init__(
        self,
        members: Sequence[Member],
        rows: Rows,
        one: Reading,
        sites: int,
        pattern: bool,
        order: int,
    ) -> None:
        self.members = members
        #: The intervention's place in its trace's list.
        self.order = order
        self._counts = rows.counts
        self._owners = rows.owners
        self.one = one
        self.pattern = pattern
        self.found: list[torch.Tensor | None] = [None] * sites
        #: Requests (the `id` of their declared interventions) that have failed while the others were read.
        self.lacking: set[int] = set()

    def results(
        self, lens: Callable[[torch.Tensor], torch.Tensor | None], at_once: int = 0
    ) -> dict[str, torch.Tensor] | None:
        """Tensors by part of an item (`""`: the only one), with a row for each row or member of the read.

        `lens` computes logits, of `at_once` rows at a time (0: of all). `None` if this rank lacks values of a location,
        or the logits.
        """
        if any(found is None for found in self.found):
            return None
        if self.lacking:
            self.keep([id(one.declaration) not in self.lacking for one in self.members])
            self.lacking.clear()
            if not self.members:
                return None
        values: torch.Tensor = torch.stack(self.found, 1) if self.pattern else self.found[0]
        if isinstance(self.one, Features) and self.one.indices is None:
            features, activations = values.unbind(-1)
            return {
                "features": torch.where(features.isnan(), -1.0, features).to(torch.int32),
                "activations": activations.contiguous(),
            }
        if isinstance(self.one, LogitLens | Lens):
            return _likeliest(values, lens, at_once, self.one.top_k)
        if isinstance(self.one, AttentionPattern) and self.one.top_k:
            places = torch.where(values[..., 0].isnan(), -1, values[..., 0].to(torch.int32))
            return {"positions": places, "weights": values[..., 1].contiguous()}
        return {"": values}

    @property
    def wants_head(self) -> bool:
        """Whether the read needs the model's head."""
        return isinstance(self.one, LogitLens | Lens)

    @property
    def takes_head(self) -> bool:
        """Whether all ranks compute the model's head now, for this read."""
        return self.wants_head and not any(found is None for found in self.found)

    def keep(self, kept: Sequence[bool]) -> None:
        """Drop the members that are not kept, with their rows."""
        if all(kept):
            return
        rows = np.flatnonzero(np.repeat(kept, self.counts))
        self.members = [one for one, stays in zip(self.members, kept, strict=True) if stays]
        self._counts = [count for count, stays in zip(self._counts, kept, strict=True) if stays]
        self._owners = None
        for site, values in enumerate(self.found):
            if values is not None:
                self.found[site] = values.index_select(0, on_device(torch.from_numpy(rows), values.device))

    def reset(self) -> None:
        """Drop the values of the step."""
        self.found = [None] * len(self.found)

    def distinct_ops(self) -> list[Op]:
        """The interventions that any of the members has."""
        members = self.members
        return members.distinct_ops() if isinstance(members, Members) else [one.op for one in members]

    def described(self) -> list[tuple[str, int, int]]:
        """The request and choice of each member, and its rows of the result."""
        return [
            (member.declaration.request, member.declaration.choice, count)
            for member, count in zip(self.members, self.counts, strict=True)
        ]

    @property
    def owners(self) -> tuple[tuple[int, int], ...]:
        """The request (the `id` of its declared interventions) and draft of each member."""
        if self._owners is None:
            self._owners = tuple([(id(one.declaration), one.draft) for one in self.members])
        return self._owners

    @property
    def counts(self) -> list[int]:
        """Rows of the result for each member."""
        return [1] * len(self.members) if self.each_one else self._counts

    @property
    def each_one(self) -> bool:
        """Whether each member has one row of the result, however many rows it has of the step."""
        return isinstance(self.one, Hold) or (isinstance(self.one, Probe) and self.one.reduce == "mean")


def _likeliest(
    values: torch.Tensor, lens: Callable[[torch.Tensor], torch.Tensor | None], at_once: int, top_k: int
) -> dict[str, torch.Tensor] | None:
    """The likeliest tokens of residual streams `[..., hidden]`, by the logits of `at_once` of them at a time."""
    rows, found = values.reshape(-1, values.shape[-1]), []
    # As many calls on each rank: also one that is given no logits takes part in all of them.
    for piece in rows.split(at_once or max(1, len(rows))):
        logits = lens(piece)
        if logits is not None:
            found.append(logits.float().topk(min(top_k, logits.shape[-1]), dim=-1))
        del logits
    if not found:
        return None
    logits, indices = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*found, strict=True))
    shape = (*values.shape[:-1], logits.shape[-1])
    # Where a condition does not hold, the values are none, and so are the logits.
    ids = torch.where(logits.isnan(), -1, indices.to(torch.int32))
    return {"token_ids": ids.reshape(shape), "logits": logits.reshape(shape)}


def raw(values: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: uint8 `[bytes]`."""
    flat = values.contiguous().view(-1)
    # torch takes a slice of one element for contiguous, whatever its stride.
    return (flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)).view(torch.uint8)


Results: TypeAlias = list[tuple[Collector, dict[str, torch.Tensor]]]
"""The reads of the collectors of a step, in the order of the collectors."""


class ReadPart(NamedTuple):
    """A tensor of what a collector reads: where its first row begins, and how far it is from row to row, in bytes."""

    key: str
    values: torch.Tensor
    offset: int
    stride: int

    @property
    def size(self) -> int:
        """How many bytes a row has."""
        return _row_bytes(self.values)


class Arrangement:
    """The place of each row of the reads in the one buffer that leaves the device.

    Collectors that read one row of each of the same requests form a block, in which each request has a row. A request's
    row holds its reads by all of these collectors, so it is one piece of the buffer, however many locations there are.
    Collectors that read several rows of a request follow one after the other.
    """

    def __init__(self, results: Results) -> None:
        #: The tensors of the collectors of each block.
        self._blocks: list[list[torch.Tensor]] = []
        #: Of each part of what a collector reads.
        self.places: list[tuple[Collector, list[ReadPart]]] = []
        offset = 0
        for _, block in itertools.groupby(results, _beside):
            found = list(block)
            tensors = [values for _, parts in found for values in parts.values()]
            if len(found) == 1:
                for collector, parts in found:
                    places = []
                    for name, values in parts.items():
                        places.append(ReadPart(name, values, offset, _row_bytes(values)))
                        offset += values.nbytes
                        self._blocks.append([values])
                    self.places.append((collector, places))
                continue
            stride, column = sum(map(_row_bytes, tensors)), offset
            for collector, parts in found:
                places = []
                for name, values in parts.items():
                    places.append(ReadPart(name, values, column, stride))
                    column += _row_bytes(values)
                self.places.append((collector, places))
            self._blocks.append(tensors)
            offset += sum(values.nbytes for values in tensors)

    def join(self) -> torch.Tensor:
        """The bytes of all of it, flat."""
        pieces = [raw(block[0]) if len(block) == 1 else raw(_side_by_side(block)) for block in self._blocks]
        if not pieces:
            return torch.empty(0, dtype=torch.uint8)
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _beside(result: tuple[Collector, dict[str, torch.Tensor]]) -> Hashable:
    """Equal for results that can be put side by side."""
    collector, parts = result
    rows = len(collector.members)
    if collector.counts == [1] * rows and all(values.shape[0] == rows for values in parts.values()):
        return collector.owners
    return id(collector)


def _row_bytes(values: torch.Tensor) -> int:
    return int(values.nbytes) // max(1, int(values.shape[0]))


def _side_by_side(tensors: list[torch.Tensor]) -> torch.Tensor:
    """`[rows, ...]` each, to `[rows, bytes or elements of all]`."""
    flat = [values.reshape(values.shape[0], -1) for values in tensors]
    if any(values.dtype != flat[0].dtype for values in flat):
        flat = [values.contiguous().view(torch.uint8) for values in flat]
    return torch.cat(flat, 1)


class ReadGroup(Group):
    """Reads into place `site` of a collector: for a `Probe` or a `LogitLens`, or what a subclass `reads`."""

    def run(self, location: LocationValues) -> None:
        values = self.read(location.values(self.rows, self.residual))
        assert self.collector is not None
        # A copy: the model writes its buffers anew before the step ends.
        self.collector.found[self.site] = values.clone() if location.aliases(values) else values

    def run_where(self, location: LocationValues, mask: torch.Tensor) -> None:
        if not (isinstance(self.one, Probe) and self.one.reduce == "mean"):
            super().run_where(location, mask)
            return
        values = self.projected(location.values(self.rows, self.residual)).float()
        pieces = zip(values.split(self.rows.counts), mask.split(self.rows.counts), strict=True)
        assert self.collector is not None
        self.collector.found[self.site] = torch.stack([filled(piece, held).nanmean(0) for piece, held in pieces])

    def read(self, values: torch.Tensor) -> torch.Tensor:
        """What the group reads of its rows `[rows, hidden]`."""
        values, one = self.projected(values), self.one
        if isinstance(one, Probe) and one.reduce == "mean":
            parts = values.float().split(self.rows.counts)
            values = values.float() if self.rows.single else torch.stack([part.mean(0) for part in parts])
        return values

    def projected(self, values: torch.Tensor) -> torch.Tensor:
        """The values as a `Probe` has them before their mean."""
        one = self.one
        if isinstance(one, Probe):
            if self.matrix is not None:
                values = scored(one, project(values.float(), self.matrix), self.bias)
            elif one.reduce in _NORMS:
                values = torch.linalg.vector_norm(values, _NORMS[one.reduce], dim=-1, dtype=torch.float32)
            elif one.reduce == "moments":
                values = _moments(values.float())
        return values


def scored(one: Probe, products: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What a `Probe` with a weight reads, of the products `[..., k]` of rows and the weight."""
    if bias is not None:
        products = products + bias
    if one.activation == "sigmoid":
        products = products.sigmoid()
    elif one.activation == "softmax":
        products = products.softmax(-1)
    assert one.weight is not None
    return products.squeeze(-1) if len(one.weight.shape) == 1 else products


#: The orders of norms.
_NORMS: Final = {"norm": 2.0, "l1": 1.0, "max": float("inf")}


def _moments(values: torch.Tensor) -> torch.Tensor:
    """The mean, variance, skewness and kurtosis of each row: `[rows, 4]`."""
    mean = values.mean(-1, keepdim=True)
    apart = values - mean
    variance = apart.square().mean(-1, keepdim=True)
    unit = apart / variance.sqrt().clamp_min(1e-12)
    return torch.cat([mean, variance, unit.pow(3).mean(-1, keepdim=True), unit.pow(4).mean(-1, keepdim=True)], -1)


class EditGroup(Group):
    """Edits for a `Steer`, `Clamp` or `Ablate`, in place."""

    edits = True

    @cached_property
    def addend(self) -> torch.Tensor:
        """Of a `Steer`: float32 `[hidden]`, or `[rows, hidden]`. Made once for as long as the batch stays the same."""
        several = self.members.distinct_ops()
        if len(several) == 1:
            return several[0].scaled_vector()
        assert self.matrix is not None
        return self.matrix[..., 0, :] * column(self.numbers[0])

    def prepare(self) -> None:
        super().prepare()
        if isinstance(self.one, Steer):
            _ = self.addend

    def run(self, location: LocationValues) -> None:
        if isinstance(self.one, Ablate) and self.matrix is None:
            factor = column(self.numbers[0])
            for half in location.halves(self.residual):
                self.rows.put(half, lambda values: values.float() * factor)
        else:
            delta = self._delta(location)
            if self.rows.index is None:
                location.hidden[: self.rows.total].add_(delta)
            else:
                self.rows.put(location.hidden, lambda values: values.float() + delta)
        location.edited()

    def _delta(self, location: LocationValues) -> torch.Tensor:
        """Return the addend of the rows: float32 `[rows, hidden]`, or `[hidden]` for all of them."""
        one, matrix = self.one, self.matrix
        if isinstance(one, Steer):
            if location.width != self.addend.shape[-1]:
                raise ValueError(f"a vector of {self.addend.shape[-1]} does not fit values of [{location.width}]")
            return self.addend
        assert matrix is not None
        amounts = project(location.values(self.rows, self.residual).float(), matrix)
        if isinstance(one, Clamp):
            low, high = map(column, self.numbers)
            change = torch.minimum(torch.maximum(amounts, _like(low, amounts)), _like(high, amounts)) - amounts
        elif isinstance(one, Ablate):
            change = amounts * (column(self.numbers[0]) - 1.0)
        else:
            raise TypeError(f"a {type(one).__name__} does not edit")
        return along(change, matrix)


def column(number: float | torch.Tensor) -> float | torch.Tensor:
    """A number of each row, to go with the row's features."""
    return number if isinstance(number, float) else number.unsqueeze(-1)


def _like(bound: float | torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.full_like(other, bound) if isinstance(bound, float) else bound.expand_as(other)


def tensors_of(value: Any, side: str) -> list[torch.Tensor]:
    """The tensors of a location's value."""
    if side == "input":
        positional, named = value
        value = [*positional, *named.values()]
    several = value if isinstance(value, (tuple, list)) else (value,)
    return [item for item in several if isinstance(item, torch.Tensor)]


class LocationValues:
    """One location's values while its groups run: a module's first tensor, and the other half of a residual stream."""

    def __init__(
        self, value: Any, side: str, total: int, sums: bool = True, *, lasting: bool = False, shard: int = -1
    ) -> None:
        self._lasting = lasting
        #: The number of the rank whose part of the features the values are; -1 if they are whole.
        self.shard = shard
        found = tensors_of(value, side)
        if not found:
            raise ValueError("there is no tensor to read at this location")
        # A model run by vLLM's Transformers backend has a leading dimension of one.
        flat = [item.squeeze(0) if item.dim() == 3 and item.shape[0] == 1 else item for item in found]
        #: All tensors of the location, such as the queries, keys and values that enter an attention.
        self.tensors = flat
        self.hidden = flat[0]
        self.residual = flat[1] if sums and len(flat) > 1 and flat[1].shape == self.hidden.shape else None
        if not self.hidden.dim() or self.hidden.shape[0] < total:
            raise ValueError(f"values of shape {list(self.hidden.shape)} do not have a row for each of {total} tokens")
        self._summed: dict[tuple[int, bool], torch.Tensor] = {}

    @property
    def width(self) -> int:
        """Features of a row."""
        return int(self.hidden.shape[-1])

    def halves(self, residual: bool) -> list[torch.Tensor]:
        """The tensors whose sum is the value."""
        return [self.hidden] if not residual or self.residual is None else [self.hidden, self.residual]

    def values(self, rows: Rows, residual: bool) -> torch.Tensor:
        """`[rows, hidden]` in the model's dtype."""
        key = id(rows), residual
        found = self._summed.get(key)
        if found is None:
            halves = [rows.take(half) for half in self.halves(residual)]
            found = self._summed[key] = halves[0] + halves[1] if len(halves) > 1 else halves[0]
        return found

    def aliases(self, values: torch.Tensor) -> bool:
        """Whether a result lies in memory that is written before the step's reads leave the device."""
        return not self._lasting and bool(
            values.untyped_storage().data_ptr() == self.hidden.untyped_storage().data_ptr()
        )

    def edited(self) -> None:
        """Drop the cached reads: the values have changed."""
        self._summed.clear()
