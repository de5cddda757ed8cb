"""Declared interventions in the worker: a step's worth of them, for all its requests at once.

A request brings a list of them instead of code. For each composition of the batch a `_Plan` is made: at each location,
groups of what can run together, whichever requests it belongs to, with the rows of the flat batch that each is about
and its vectors stacked on the device. While the batch stays the same, a step costs a few kernels a group and no Python
per request: what was read leaves as one buffer, whose `Layout` (which bytes are whose) was sent when the plan was made.

Interventions of a request keep their order: only those at the same place in their lists share a group, and groups run
in that order. They run before a block is served at the same location.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from nnsight.intervention.batching import SkipParts
from nnsight.modeling.vllm.interleaver import VLLMInterleaver

from tracewire_bus.domain.intervention_checks import live_name, resolved
from tracewire_bus.wire.codec import digest_bytes
from tracewire_bus.wire.messages import Ablate, Clamp, Failure, LogitLens, Probe, Steer, StopWhen
from tracewire_bus.wire.values import decoder
from tracewire_engine.link.step_link import Batch, Layout, LayoutEntry, Part, Placed, Slot
from tracewire_engine.worker.blocks.batched_serving import BlockServing
from tracewire_engine.worker.blocks.live_params import LiveRun
from tracewire_engine.worker.host_copy import TORCH_DTYPES
from tracewire_engine.worker.parallel.rank_agreement import DECLARED, Key, Ranks
from tracewire_engine.worker.parallel.topology import Topology
from tracewire_engine.worker.tensors import to_tensors

from .cuda_graphs import current_capture
from .recorded_plans import Recorded, Recorder

__all__ = ["Declaration", "DeclaredInterleaver", "DeclaredRequests", "is_early"]

_placed = decoder(list[Placed])

#: Bytes of vectors kept on the device for further requests that bring the same ones.
CACHE_BYTES = 256 * 1024 * 1024

#: How many requests' interventions are kept decoded, and of how many bytes each at most.
REMEMBERED, LONG = 64, 128 * 1024

#: After how many steps a plan is recorded: about as many as recording costs of those that it saves.
RECORD_AFTER = 8


class VectorCache:
    """Vectors on the device, float32, by the digest of what they were made of: the same one is there once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._held: OrderedDict[tuple[str, bytes], torch.Tensor] = OrderedDict()
        self._bytes = 0

    def get(
        self, purpose: str, value: Any, make: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]
    ) -> torch.Tensor:
        """`make(value)` on the device; `purpose` tells apart what is made of one value in several ways."""
        array = np.ascontiguousarray(value)
        key = purpose, digest_bytes(repr((array.dtype.name, array.shape)).encode() + array.tobytes())
        found = self._held.get(key)
        if found is None:
            made = np.array(make(array.astype(np.float32)), dtype=np.float32)
            found = self._held[key] = to_tensors(made, self.device)
            self._bytes += found.nbytes
            while self._bytes > CACHE_BYTES and len(self._held) > 1:
                self._bytes -= self._held.popitem(last=False)[1].nbytes
        else:
            self._held.move_to_end(key)
        return found


def _unit(vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return vector / length if length else vector


def _basis(directions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Orthonormal rows that span the given ones."""
    rows = np.atleast_2d(directions).astype(np.float64)
    _, sizes, spanning = np.linalg.svd(rows, full_matrices=False)
    kept: np.ndarray[Any, Any] = spanning[sizes > sizes.max(initial=0.0) * 1e-6]
    return kept


class Known:
    """Interventions that were decoded, their vectors on the device, by their encoded form: of those that have no live
    parameters, which are the same for every request that brings them.
    """

    def __init__(self, device: torch.device) -> None:
        self.vectors = VectorCache(device)
        self._held: OrderedDict[bytes, tuple[list[Placed], list[_Op]]] = OrderedDict()

    def get(self, encoded: bytes, live: LiveRun) -> tuple[list[Placed], list[_Op]]:
        """The interventions, and what is run for each, in a list of the caller's own."""
        found = self._held.get(encoded)
        if found is None:
            placed = [placed for placed in _placed(encoded) if not isinstance(placed.intervention, StopWhen)]
            found = placed, [_Op(one, live.values, self.vectors) for one in placed]
            if len(encoded) > LONG or any(map(_has_live, placed)):
                return found
            self._held[encoded] = found
            if len(self._held) > REMEMBERED:
                self._held.popitem(last=False)
        else:
            self._held.move_to_end(encoded)
        placed, ops = found
        return placed, list(ops)


def _has_live(placed: Placed) -> bool:
    return any(live_name(getattr(placed.intervention, name)) for name in placed.intervention.__struct_fields__)


class _Op:
    """One intervention of one request, its vectors on the device. `key` says with what else it can share a group."""

    __slots__ = ("bias", "key", "matrix", "numbers", "one", "pattern", "sites")

    def __init__(self, placed: Placed, live: dict[str, Any], vectors: VectorCache) -> None:
        one = self.one = resolved(placed.intervention, live)
        self.sites = [(location, residual) for location, residual in placed.sites]
        self.pattern = placed.pattern
        self.matrix: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self.numbers: tuple[float, ...] = ()
        key: tuple[Any, ...] = ()
        if isinstance(one, Probe):
            key = (one.activation, one.reduce)
            if one.weight is not None:
                self.matrix = vectors.get("rows", one.weight, np.atleast_2d)
                key += (tuple(np.shape(one.weight)), one.bias is not None)
            if one.bias is not None:
                self.bias = vectors.get("bias", np.asarray(one.bias), lambda bias: bias.reshape(-1))
        elif isinstance(one, LogitLens):
            key = (one.top_k,)
        elif isinstance(one, Steer):
            self.matrix = vectors.get("rows", one.vector, np.atleast_2d)
            self.numbers = (float(one.scale),)  # type: ignore[arg-type]
            key = (self.matrix.shape,)
        elif isinstance(one, Clamp):
            self.matrix = vectors.get("unit", one.direction, lambda vector: np.atleast_2d(_unit(vector)))
            low, high = one.min, one.max
            self.numbers = (-float("inf") if low is None else float(low), float("inf") if high is None else float(high))  # type: ignore[arg-type]
            key = (self.matrix.shape,)
        elif isinstance(one, Ablate):
            self.numbers = (float(one.keep),)  # type: ignore[arg-type]
            if one.direction is not None:
                self.matrix = vectors.get("basis", one.direction, _basis)
                key = (self.matrix.shape,)
        self.key = (type(one).__name__, getattr(one, "positions", ""), self.pattern, *key)

    @property
    def reads(self) -> bool:
        """Whether it saves something."""
        return isinstance(self.one, (Probe, LogitLens))


class Declaration:
    """The declared interventions of one live request, by the name that the adapter gave it."""

    def __init__(self, request: str, choice: int, encoded: bytes, live: LiveRun, known: Known) -> None:
        self.request = request
        self.choice = choice
        self.live = live
        self._placed, self.ops = known.get(encoded, live)
        self.reads = any(op.reads for op in self.ops)
        self.names = [str(getattr(op.one, "name", "")) for op in self.ops if op.reads]
        self.locations = [location for op in self.ops for location, _ in op.sites]
        #: Positions up to here have been read, and are not read again when a preempted request is recomputed.
        self.seen = 0
        self.failure: Failure | None = None
        #: The scheduler's name of the request.
        self.id = ""
        #: Whether the failure has been reported with a step; whether other pipeline stages were told.
        self.reported = False
        #: The index of the token in whose step it was reported.
        self.failed_at: int | None = None
        self.told = False

    def renew(self, vectors: VectorCache) -> bool:
        """Take the live parameters as they are now. Returns whether any intervention has one."""
        found = False
        for place, placed in enumerate(self._placed):
            if _has_live(placed):
                self.ops[place] = _Op(placed, self.live.values, vectors)
                found = True
        return found


def is_early(encoded: bytes, topology: Topology) -> bool:
    """Whether any of a request's interventions is on another pipeline stage than the last."""
    try:
        sites = [site for placed in _placed(encoded) for site in placed.sites]
    except Exception:  # as it will fail to be taken
        return False
    return any(topology.owner(location) != topology.last for location, _ in sites)


class _Rows:
    """Rows of the flat batch: of several requests, each with `counts[i]` of them from `starts[i]` on."""

    def __init__(self, spans: Sequence[tuple[int, int]], total: int, device: torch.device) -> None:
        self.counts = [count for _, count in spans]
        self.single = all(count == 1 for count in self.counts)
        #: Row numbers; None if they are simply all rows of the step.
        self.index: torch.Tensor | None = None
        self.total = total
        rows = [row for start, count in spans for row in range(start, start + count)]
        if rows != list(range(total)):
            self.index = _to_device(torch.tensor(rows, dtype=torch.int64), device)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """These rows of `tensor`; a view of it if they are all there is."""
        return tensor[: self.total] if self.index is None else tensor.index_select(0, self.index)

    def put(self, tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace these rows by what `change` makes of them."""
        if self.index is None:
            view = tensor[: self.total]
            view.copy_(change(view))
        else:
            tensor.index_copy_(0, self.index, change(tensor.index_select(0, self.index)).to(tensor.dtype))


class _Member:
    """An intervention with the rows that it is about in this composition of the batch."""

    __slots__ = ("declaration", "op", "span")

    def __init__(self, declaration: Declaration, op: _Op, span: tuple[int, int]) -> None:
        self.declaration = declaration
        self.op = op
        self.span = span


class _Group:
    """Members that run together at one location. Their vectors are stacked, one a row where they differ."""

    def __init__(self, members: list[_Member], rows: _Rows, residual: bool, device: torch.device) -> None:
        self.members = members
        self.rows = rows
        self.residual = residual
        self.one = members[0].op.one
        counts = rows.counts
        self.matrix = _stacked([member.op.matrix for member in members], counts)
        self.bias = _stacked([member.op.bias for member in members], counts)
        self.numbers = [
            _spread([member.op.numbers[index] for member in members], counts, device)
            for index in range(len(members[0].op.numbers))
        ]
        if isinstance(self.one, Steer) and self.matrix is not None:
            # [hidden], or [rows, hidden]: scaled once for as long as the batch stays the same.
            vector = self.matrix[..., 0, :]
            scale = self.numbers[0]
            self.addend = vector * (scale if isinstance(scale, float) else scale.unsqueeze(-1))

    def run(self, stage: _Serving) -> None:
        """Read or edit the step's values. Raises before anything is written."""
        raise NotImplementedError


def _stacked(tensors: Sequence[torch.Tensor | None], counts: Sequence[int]) -> torch.Tensor | None:
    """The members' vectors: one for all if they share it, else `[rows, ...]`."""
    first = tensors[0]
    if first is None or all(tensor is first for tensor in tensors):
        return first
    repeated = [tensor for tensor, count in zip(tensors, counts, strict=True) for _ in range(count)]
    return torch.stack(repeated)


def _spread(numbers: Sequence[float], counts: Sequence[int], device: torch.device) -> float | torch.Tensor:
    """The members' numbers: one for all if they share it, else `[rows]`."""
    if all(number == numbers[0] for number in numbers):
        return numbers[0]
    repeated = [number for number, count in zip(numbers, counts, strict=True) for _ in range(count)]
    return _to_device(torch.tensor(repeated, dtype=torch.float32), device)


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small tensor on the device, without waiting for what the device is doing."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _project(values: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """`[rows, hidden]` on `[k, hidden]`, or on `[rows, k, hidden]` of its own for each row: `[rows, k]`."""
    if values.dim() != 2 or values.shape[-1] != matrix.shape[-1]:
        raise ValueError(f"a vector of {matrix.shape[-1]} does not fit values of shape {list(values.shape[1:])}")
    if matrix.dim() == 2:
        return values @ matrix.T
    return torch.linalg.vecdot(values.unsqueeze(1), matrix)


def _along(coefficients: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """`[rows, k]` times `[k, hidden]` (or `[rows, k, hidden]`): `[rows, hidden]`."""
    if matrix.dim() == 2:
        return coefficients @ matrix
    return (coefficients.unsqueeze(-1) * matrix).sum(1)


class _Collector:
    """What one read of some requests yields in a step, from all its locations."""

    def __init__(
        self,
        members: list[_Member],
        rows: _Rows,
        one: Probe | LogitLens,
        sites: int,
        pattern: bool,
        order: int,
    ) -> None:
        self.members = members
        #: The intervention's place in its trace's list.
        self.order = order
        self.rows = rows
        self.one = one
        self.pattern = pattern
        self.found: list[torch.Tensor | None] = [None] * sites

    def results(self, lens: Callable[[torch.Tensor], torch.Tensor | None]) -> dict[str, torch.Tensor] | None:
        """By part of an item (`""`: it has none), a tensor with one row for each row, or each member, of the read."""
        if any(found is None for found in self.found):
            return None
        values: torch.Tensor = torch.stack(self.found, 1) if self.pattern else self.found[0]
        if isinstance(self.one, LogitLens):
            logits = lens(values.reshape(-1, values.shape[-1]))
            if logits is None:
                return None
            top = logits.float().topk(min(self.one.top_k, logits.shape[-1]), dim=-1)
            shape = (*values.shape[:-1], top.values.shape[-1])
            return {"token_ids": top.indices.to(torch.int32).reshape(shape), "logits": top.values.reshape(shape)}
        return {"": values}

    @property
    def takes_head(self) -> bool:
        """Whether the model's head is to be computed for it, which is on all ranks."""
        return isinstance(self.one, LogitLens) and not any(found is None for found in self.found)

    def reset(self) -> None:
        """The step is over."""
        self.found = [None] * len(self.found)

    def shares(self) -> list[tuple[str, int, int]]:
        """The request and choice of each member, and its rows of the result."""
        return [
            (member.declaration.request, member.declaration.choice, count)
            for member, count in zip(self.members, self.counts, strict=True)
        ]

    @property
    def counts(self) -> list[int]:
        """Rows of the result for each member."""
        mean = isinstance(self.one, Probe) and self.one.reduce == "mean"
        return [1] * len(self.members) if mean else self.rows.counts


def _raw(values: torch.Tensor) -> torch.Tensor:
    """Its bytes, flat."""
    return values.contiguous().view(-1).view(torch.uint8)


class _Read(_Group):
    """Reads for a `Probe`, or for a `LogitLens`, into place `site` of a collector."""

    collector: _Collector
    site: int

    def run(self, stage: _Serving) -> None:
        values = stage.values(self.rows, self.residual)
        one = self.one
        if isinstance(one, Probe):
            if self.matrix is not None:
                values = _project(values.float(), self.matrix)
                if self.bias is not None:
                    values = values + self.bias
                if one.activation == "sigmoid":
                    values = values.sigmoid()
                elif one.activation == "softmax":
                    values = values.softmax(-1)
                if np.ndim(one.weight) == 1:
                    values = values.squeeze(-1)
            elif one.reduce == "norm":
                values = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32)
            if one.reduce == "mean":
                parts = values.float().split(self.rows.counts)
                values = values.float() if self.rows.single else torch.stack([part.mean(0) for part in parts])
        # The model writes its buffers anew before the step ends.
        self.collector.found[self.site] = values.clone() if stage.aliases(values) else values


class _Edit(_Group):
    """Edits for a `Steer`, `Clamp` or `Ablate`, in place."""

    def run(self, stage: _Serving) -> None:
        one, matrix = self.one, self.matrix
        if isinstance(one, Ablate) and matrix is None:
            keep = self.numbers[0]
            factor = keep if isinstance(keep, float) else keep.unsqueeze(-1)
            for half in stage.halves(self.residual):
                self.rows.put(half, lambda values: values.float() * factor)
        else:
            assert matrix is not None
            if isinstance(one, Steer):
                if stage.width != self.addend.shape[-1]:
                    raise ValueError(f"a vector of {self.addend.shape[-1]} does not fit values of [{stage.width}]")
                delta = self.addend
            else:
                amounts = _project(stage.values(self.rows, self.residual).float(), matrix)
                if isinstance(one, Clamp):
                    low, high = (
                        number if isinstance(number, float) else number.unsqueeze(-1) for number in self.numbers
                    )
                    change = torch.minimum(torch.maximum(amounts, _like(low, amounts)), _like(high, amounts)) - amounts
                else:
                    keep = self.numbers[0]
                    change = amounts * ((keep if isinstance(keep, float) else keep.unsqueeze(-1)) - 1.0)
                delta = _along(change, matrix)
            if self.rows.index is None:
                stage.hidden[: self.rows.total].add_(delta)
            else:
                self.rows.put(stage.hidden, lambda values: values.float() + delta)
        stage.edited()


def _like(bound: float | torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.full_like(other, bound) if isinstance(bound, float) else bound.expand_as(other)


def _tensors(value: Any, side: str) -> list[torch.Tensor]:
    """The tensors of a location's value."""
    if side == "input":
        positional, named = value
        value = [*positional, *named.values()]
    several = value if isinstance(value, (tuple, list)) else (value,)
    return [item for item in several if isinstance(item, torch.Tensor)]


class _Serving:
    """One location's values while its groups run: a module's first tensor, and the other half of a residual stream."""

    def __init__(self, value: Any, side: str, total: int, sums: bool = True) -> None:
        tensors = _tensors(value, side)
        if not tensors:
            raise ValueError("there is no tensor to read at this location")
        # A model run by vLLM's Transformers backend has a leading dimension of one.
        flat = [item.squeeze(0) if item.dim() == 3 and item.shape[0] == 1 else item for item in tensors]
        self.hidden = flat[0]
        self.residual = flat[1] if sums and len(flat) > 1 and flat[1].shape == self.hidden.shape else None
        if not self.hidden.dim() or self.hidden.shape[0] < total:
            raise ValueError(f"values of shape {list(self.hidden.shape)} do not have a row for each of {total} tokens")
        self._known: dict[tuple[int, bool], torch.Tensor] = {}

    @property
    def width(self) -> int:
        """Features of a row."""
        return int(self.hidden.shape[-1])

    def halves(self, residual: bool) -> list[torch.Tensor]:
        """The tensors that the value is the sum of."""
        return [self.hidden] if not residual or self.residual is None else [self.hidden, self.residual]

    def values(self, rows: _Rows, residual: bool) -> torch.Tensor:
        """`[rows, hidden]` in the model's dtype."""
        key = id(rows), residual
        found = self._known.get(key)
        if found is None:
            halves = [rows.take(half) for half in self.halves(residual)]
            found = self._known[key] = halves[0] + halves[1] if len(halves) > 1 else halves[0]
        return found

    def aliases(self, values: torch.Tensor) -> bool:
        """Whether a result lies in the model's own memory."""
        return bool(values.untyped_storage().data_ptr() == self.hidden.untyped_storage().data_ptr())

    def edited(self) -> None:
        """What was read before is no longer what is there."""
        self._known.clear()


class Stage:
    """All groups at one location, in order."""

    def __init__(self, location: str, owner: DeclaredRequests) -> None:
        self.location = location
        self.side = location.rpartition(".")[2]
        self.groups: list[_Group] = []
        #: Whether the model has come by.
        self.reached = False
        self._owner = owner
        self._recorded: Recorded | None = None
        #: Where the values lay when it was recorded, and what the groups read then, which each replay writes anew.
        self._addresses: tuple[int, ...] = ()
        self._found: list[tuple[_Read, torch.Tensor | None]] = []

    @property
    def edits(self) -> bool:
        """Whether any group changes the value."""
        return any(isinstance(group, _Edit) for group in self.groups)

    def replay(self, value: Any) -> None:
        """As `run`, for a value that lies where it lay in the plan's other steps, as those of CUDA graphs do.

        Once a plan has held for `RECORD_AFTER` steps, its kernels are recorded as a CUDA graph, and launched together.
        """
        plan = self._owner.plan
        if plan is None or (self._recorded is None and not (plan.recordable and plan.steps >= RECORD_AFTER)):
            return self.run(value)
        addresses = tuple([item.data_ptr() for item in _tensors(value, self.side)])
        if self._recorded is None:
            plan.recordable = not self._owner.stale and self._record(value)
            self._addresses = addresses
        if self._recorded is None or addresses != self._addresses:
            return self.run(value)
        self._recorded.replay()
        for group, found in self._found:
            group.collector.found[group.site] = found
        plan.replayed += 1
        return None

    def _record(self, value: Any) -> bool:
        """Record what `run` does with values that lie there. Whether it can be recorded."""

        def serve() -> None:
            serving = _Serving(value, self.side, self._owner.total, self._owner.sums)
            for group in self.groups:
                group.run(serving)

        self._recorded = self._owner.recorder.record(serve)
        self._found = [(group, group.collector.found[group.site]) for group in self.groups if isinstance(group, _Read)]
        return self._recorded is not None

    def run(self, value: Any) -> None:
        """Serve the location's value to the groups; edits land in it, in place. Raises nothing."""
        self.reached = True
        try:
            serving = _Serving(value, self.side, self._owner.total, self._owner.sums)
        except Exception as error:
            for group in self.groups:
                self._owner.fail(group.members, error)
            self.groups = []
            return
        for group in list(self.groups):
            try:
                group.run(serving)
            except Exception as error:
                self.groups.remove(group)
                self._owner.fail(group.members, error)


class _Plan:
    """What runs where for one composition of the batch."""

    def __init__(self) -> None:
        self.stages: dict[str, Stage] = {}
        self.collectors: list[_Collector] = []
        #: With the position after the first step's last one, and the index of the token that it samples.
        self.declarations: list[tuple[Declaration, int, int]] = []
        self.req_ids: list[str] = []
        self.computed: list[int] = []
        #: Whether any request of the step saves something.
        self.reads = False
        #: Whether the next step may be the same again: every request generates.
        self.steady = False
        self.steps = 0
        self.layout: Layout | None = None
        #: Of which step the layout is.
        self.laid_out = 0
        #: Whether its stages can be CUDA graphs; how many were launched as one in the step under way.
        self.recordable = True
        self.replayed = 0
        #: Whether it was tried to join what they read likewise.
        self.settled = False
        #: What was read, one piece after the other, where each launch leaves it; and what joins the pieces.
        self.flat: torch.Tensor | None = None
        self.join: Recorded | None = None


class DeclaredRequests:
    """The declared interventions of the worker's live requests, and the plan of the step under way."""

    def __init__(self, device: torch.device, *, sums: bool = True) -> None:
        #: Whether the residual stream is the sum of what a decoder layer returns, if that is two tensors.
        self.sums = sums
        self.known = Known(device)
        self.live: dict[str, Declaration] = {}
        #: By location, what runs in the step under way.
        self.stages: dict[str, Stage] = {}
        self.total = 0
        self.plan: _Plan | None = None
        self.recorder = Recorder(device)
        self._device = device
        self._layouts = 0
        #: Under pipeline parallelism, whether a location is on this stage.
        self.here: Callable[[str], bool] | None = None
        #: Whether the plan no longer holds: a request came or went, or failed.
        self.stale = False
        #: Under tensor parallelism, the other ranks.
        self.ranks: Ranks | None = None

    def add(self, request_id: str, declaration: Declaration) -> None:
        """Take a new request's."""
        self.live[request_id] = declaration
        declaration.id = request_id
        self.stale = True

    def renew(self, run: LiveRun) -> None:
        """Live parameters of `run` have changed: from the next step on they hold."""
        for request_id in run.requests:
            declaration = self.live.get(request_id)
            if declaration is None:
                continue
            try:
                self.stale |= declaration.renew(self.known.vectors)
            except Exception as error:  # too large for the device, say
                self._failed(declaration, Failure(type=type(error).__name__, message=str(error), field="live"))

    def pop(self, request_id: str) -> Declaration | None:
        """Forget a request's, which is over."""
        found = self.live.pop(request_id, None)
        if found is not None:
            self.stale = True
        return found

    def fail(self, members: Iterable[_Member], error: Exception) -> None:
        """End what belongs to these members with an error; the others go on."""
        for member in members:
            one = member.op.one
            name = getattr(one, "name", "") or type(one).__name__
            message = f"{name} at {getattr(one, 'at', '')}: {error}"
            failure = Failure(type=type(error).__name__, message=message, field="interventions")
            self._failed(member.declaration, failure)
        self.stale = True

    def _failed(self, declaration: Declaration, failure: Failure) -> None:
        """End a request's interventions with an error, unless they have failed."""
        self.stale = True
        if declaration.failure is None:
            declaration.failure = failure
            if self.ranks is not None:
                self.ranks.fail(Key(declaration.id, DECLARED), lambda: failure)

    def agree(self, what: str, members: Iterable[_Member]) -> bool:
        """Under tensor parallelism: whether to make what these members are about whole, which takes all ranks."""
        ranks = self.ranks
        if ranks is None:
            return True
        asking = {Key(one.declaration.id, DECLARED): one.declaration for one in members}
        asking = {key: one for key, one in asking.items() if one.failure is None}
        agreed = ranks.agree(what, asking)
        for key in asking.keys() - agreed:
            self._failed(
                asking[key], Failure(type="RanksDiffer", message=str(ranks.differ(key)), field="interventions")
            )
        return bool(agreed)

    # --- a step -----------------------------------------------------------------------------------------------------

    def begin(self, req_ids: list[str], scheduled: dict[str, int], total: int, states: dict[str, Any]) -> None:
        """Plan a step: `req_ids` in the order of the flat batch's rows, and how many tokens of each it computes."""
        if not self.live:
            self.plan, self.stages = None, {}
            return
        self.total = total
        plan = self.plan
        computed = [states[request_id].num_computed_tokens for request_id in req_ids]
        if (
            plan is None
            or self.stale
            or not plan.steady
            or total != len(req_ids)
            or plan.req_ids != req_ids
            or [count + 1 for count in plan.computed] != computed
        ):
            plan = self.plan = self._build(req_ids, scheduled, total, states, computed)
            self.stale = False
        else:
            plan.computed = computed
            plan.steps += 1
            plan.replayed = 0
        self.stages = plan.stages

    def _build(
        self, req_ids: list[str], scheduled: dict[str, int], total: int, states: dict[str, Any], computed: list[int]
    ) -> _Plan:
        plan = _Plan()
        plan.req_ids, plan.computed, plan.steady = list(req_ids), computed, True
        if self.plan is not None:
            for earlier, position, _ in self.plan.declarations:
                earlier.seen = max(earlier.seen, position + self.plan.steps)
        gathered: dict[tuple[Any, ...], list[_Member]] = {}
        start = 0
        for request_id, first in zip(req_ids, computed, strict=True):
            count = scheduled.get(request_id, 0)
            declaration = self.live.get(request_id)
            if declaration is not None and count and declaration.failure is None:
                prompt = states[request_id].num_prompt_tokens
                plan.steady &= first >= prompt
                plan.declarations.append((declaration, first + count, first + count - prompt))
                plan.reads |= declaration.reads
                for order, op in enumerate(declaration.ops):
                    span = _span(op, declaration.seen, start, first, count, prompt)
                    if span[1]:
                        key: tuple[Any, ...] = (order, tuple(op.sites), op.key)
                        if span[1] > 1:
                            # Vectors are not spread over a prompt's rows: each has a group of its own.
                            key += (id(op.matrix), id(op.bias), op.numbers)
                        gathered.setdefault(key, []).append(_Member(declaration, op, span))
            start += count
        known: dict[tuple[tuple[int, int], ...], _Rows] = {}
        for (order, sites, *_), members in sorted(gathered.items(), key=lambda item: item[0][0]):
            spans = tuple(member.span for member in members)
            rows = known.get(spans)
            if rows is None:
                rows = known[spans] = _Rows(spans, total, self._device)
            op = members[0].op
            collector = None
            if isinstance(op.one, (Probe, LogitLens)):
                collector = _Collector(members, rows, op.one, len(sites), op.pattern, order)
                plan.collectors.append(collector)
            for place, (location, residual) in enumerate(sites):
                if self.here is not None and not self.here(location):
                    # What another stage reads does not lie in the same place in each step.
                    plan.settled |= collector is not None
                    continue
                stage = plan.stages.setdefault(location, Stage(location, self))
                group: _Group
                if collector is not None:
                    group = _Read(members, rows, residual, self._device)
                    group.collector, group.site = collector, place
                else:
                    group = _Edit(members, rows, residual, self._device)
                stage.groups.append(group)
        return plan

    def check_reached(self) -> None:
        """Fail what the forward pass of a plan's first step did not come by."""
        plan = self.plan
        if plan is not None and not plan.steps:
            for stage in plan.stages.values():
                if not stage.reached:
                    for group in stage.groups:
                        self.fail(group.members, ValueError("the model's forward pass does not come by there"))

    def read(self) -> list[tuple[int, int, list[tuple[str, int, int]], torch.Tensor]]:
        """What this pipeline stage read in the step, for the one that reports; and forget it.

        By intervention (its place in its trace's list) and site: the members (request, choice and their rows of the
        result, in order), and the rows.
        """
        if self.plan is None:
            return []
        found = []
        for collector in self.plan.collectors:
            members = collector.shares()
            for site, values in enumerate(collector.found):
                if values is not None:
                    found.append((collector.order, site, members, values))
            collector.found = [None] * len(collector.found)
        return found

    def supply(self, read: list[tuple[int, int, list[tuple[str, int, int]], torch.Tensor]]) -> None:
        """Take what another stage has read in this step."""
        if self.plan is None or not read:
            return
        rows: dict[tuple[int, int, str, int], torch.Tensor] = {}
        for order, site, members, values in read:
            pieces = values.split([count for _, _, count in members])
            for (request, choice, _), piece in zip(members, pieces, strict=True):
                rows[order, site, request, choice] = piece
        for collector in self.plan.collectors:
            for site in range(len(collector.found)):
                keys = [(collector.order, site, request, choice) for request, choice, _ in collector.shares()]
                if all(key in rows for key in keys):
                    pieces = [rows[key] for key in keys]
                    collector.found[site] = torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def failures(self) -> dict[str, Failure]:
        """By the scheduler's names, requests whose interventions have failed here since this was asked last."""
        found = {}
        for request_id, declaration in self.live.items():
            if declaration.failure is not None and not declaration.told:
                declaration.told = True
                found[request_id] = declaration.failure
        return found

    def fail_with(self, failures: dict[str, Failure]) -> None:
        """Take failures on another stage."""
        for request_id, failure in failures.items():
            declaration = self.live.get(request_id)
            if declaration is not None:
                self._failed(declaration, failure)

    def collect(
        self, lens: Callable[[torch.Tensor], torch.Tensor | None]
    ) -> tuple[Layout | None, Batch, torch.Tensor] | None:
        """What the step read: a layout if it is not the last one again, and the bytes (on the device) it describes.

        `None` if nothing is saved by the requests of this step.
        """
        self.check_reached()
        plan = self.plan
        if plan is None or not plan.reads:
            return None
        replayed = plan.replayed == len(plan.stages) and plan.layout is not None and not self.stale
        if replayed and plan.flat is not None:
            if plan.join is not None:
                plan.join.replay()
            for collector in plan.collectors:
                collector.reset()
            return None, self._batch(plan), plan.flat
        if replayed and not plan.settled:
            plan.settled = True
            self._settle(plan)
        pieces: list[torch.Tensor] = []
        found: list[tuple[_Collector, dict[str, torch.Tensor]]] = []
        for collector in plan.collectors:
            results = None
            try:
                if not collector.takes_head or self.agree("the head", collector.members):
                    results = collector.results(lens)
            except Exception as error:
                self.fail(collector.members, error)
            if results is None:
                continue
            found.append((collector, results))
            pieces.extend(_raw(values) for values in results.values())
            collector.reset()
        fresh = None
        if plan.layout is None or self.stale:
            fresh = plan.layout = self._layout(plan, found)
            plan.laid_out = plan.steps
        flat = torch.cat(pieces) if len(pieces) > 1 else pieces[0] if pieces else torch.empty(0, dtype=torch.uint8)
        return fresh, self._batch(plan), flat

    @staticmethod
    def _batch(plan: _Plan) -> Batch:
        assert plan.layout is not None
        return Batch(layout=plan.layout.id, step=plan.steps - plan.laid_out)

    def _settle(self, plan: _Plan) -> None:
        """Each step leaves what it reads where it lies now: have it joined from there from now on.

        A logit lens takes the model's head, whose kernels are vLLM's: it is not recorded.
        """
        if not plan.collectors or any(isinstance(collector.one, LogitLens) for collector in plan.collectors):
            return
        only = plan.collectors[0] if len(plan.collectors) == 1 else None
        if only is not None and not only.pattern and only.found[0] is not None and only.found[0].is_contiguous():
            plan.flat = _raw(only.found[0])
            return
        joined: list[torch.Tensor] = []

        def join() -> None:
            results = [collector.results(lambda _: None) or {} for collector in plan.collectors]
            joined.append(torch.cat([_raw(values) for found in results for values in found.values()]))

        plan.join = self.recorder.record(join)
        if plan.join is not None:
            plan.flat = joined[0]

    def _layout(self, plan: _Plan, found: list[tuple[_Collector, dict[str, torch.Tensor]]]) -> Layout:
        slots: dict[int, list[Slot]] = {id(declaration): [] for declaration, *_ in plan.declarations}
        offset = 0
        for collector, results in found:
            parts: list[list[Part]] = [[] for _ in collector.members]
            for name, values in results.items():
                size = values.nbytes // max(1, values.shape[0])
                dtype = TORCH_DTYPES[values.dtype]
                row = 0
                mean = isinstance(collector.one, Probe) and collector.one.reduce == "mean"
                for index, count in enumerate(collector.counts):
                    tail = tuple(values.shape[1:])
                    shape = tail if mean or collector.one.positions == "last" else (count, *tail)
                    parts[index].append(Part(name, dtype, shape, offset + row * size, count * size))
                    row += count
                offset += values.nbytes
            for member, own in zip(collector.members, parts, strict=True):
                name = getattr(member.op.one, "name", "")
                slots[id(member.declaration)].append(Slot(name, own))
        self._layouts += 1
        entries = []
        for declaration, _, first in plan.declarations:
            # A negative index: its prompt is not computed to its end, and nothing is sampled.
            if declaration.reads and first >= 0:
                items = slots[id(declaration)]
                entries.append(LayoutEntry(declaration.request, declaration.choice, first + plan.steps, items))
        return Layout(self._layouts, entries)


def _span(op: _Op, seen: int, start: int, first: int, count: int, prompt: int) -> tuple[int, int]:
    """Which rows an intervention is about: the first of them, and how many.

    The request's rows begin at `start` and hold `count` of its positions, from `first` on; its prompt has `prompt`.
    """
    positions, end = getattr(op.one, "positions", "last"), first + count
    if op.reads:
        if positions == "last":
            return (start + count - 1, 1) if end >= prompt else (start, 0)
        low = max(first, seen, prompt if positions == "generated" else 0)
    else:
        low = max(first, {"generated": prompt, "last": prompt - 1}.get(positions, 0))
    high = min(end, prompt) if positions == "prompt" else end
    return start + low - first, max(0, high - low)


class DeclaredInterleaver(VLLMInterleaver, BlockServing):
    """nnsight's interleaver, which serves a location to declared interventions before it serves it to blocks.

    While blocks run, every module hands its values to it. While none does, no module does: the few locations that
    declared interventions are about are then reached by forward hooks of their own, put in on first use.
    """

    declared: DeclaredRequests
    module: torch.nn.Module
    armed: set[str]
    #: Under pipeline parallelism, who holds what, and what another stage serves though the model comes by here.
    topology: Topology | None = None
    elsewhere: frozenset[str] = frozenset()

    @classmethod
    def install(cls, interleaver: VLLMInterleaver, declared: DeclaredRequests, module: torch.nn.Module) -> None:
        """Make `interleaver` one of these, over `module`, the model that its locations count from."""
        interleaver.__class__ = cls
        interleaver.declared, interleaver.module, interleaver.armed = declared, module, set()
        interleaver.skipped = {}

    def arm(self, locations: Iterable[str]) -> None:
        """Reach these locations without blocks, too."""
        for location in locations:
            if location in self.armed:
                continue
            self.armed.add(location)
            path, _, side = location.removeprefix("model.").rpartition(".")
            module = self.module.get_submodule(path)
            if side == "input":
                module.register_forward_pre_hook(self._entering(location), with_kwargs=True)
            else:
                module.register_forward_hook(self._leaving(location))

    def _entering(self, location: str) -> Callable[..., Any]:
        def hook(_: Any, positional: Any, named: Any) -> Any:
            return self._hooked(location, (positional, named))

        return hook

    def _leaving(self, location: str) -> Callable[..., Any]:
        def hook(_: Any, __: Any, output: Any) -> Any:
            return self._hooked(location, output)

        return hook

    def _hooked(self, location: str, value: Any) -> Any:
        stage = None if location in self.elsewhere else self.declared.stages.get(location)
        return None if stage is None or self.busy or not self.interleaving else self._serve(stage, value)

    def handle(self, provider: str, value: Any) -> Any:
        # What nearly all of a model's locations are in nearly all steps: counted, and of no concern to anybody.
        if not (
            provider in self.parked
            or provider in self.declared.stages
            or provider in self.observers
            or self.skipped
            or self.taps
            or self.elsewhere
        ):
            self.counts[provider] = self.counts.get(provider, 0) + 1
            return value
        if provider in self.elsewhere:
            return value
        if self.skipped:
            value = self.put_skipped(provider, value)
        stage = self.declared.stages.get(provider)
        if stage is not None and self.interleaving:
            value = self._serve(stage, value)
        if provider in self.taps:
            current_capture()
        value = super().handle(provider, value)
        return self.keep_skipped(provider, value) if type(value) is SkipParts else value

    def replay(self, location: str, live: Any) -> None:
        # Most steps of most engines have nobody at most taps, and few need what nnsight does for a block.
        stage = self.declared.stages.get(location)
        if self.busy or (stage is not None and self.is_sharded(location)):
            super().replay(location, live)
        elif stage is not None and self.interleaving:
            stage.replay(live)

    def _serve(self, stage: Stage, value: Any) -> Any:
        if not self.is_sharded(stage.location):
            stage.run(value)
            return value
        if not self.declared.agree(stage.location, [one for group in stage.groups for one in group.members]):
            stage.reached = True
            return value
        whole, undo = self.fragments.whole(stage.location, value)
        stage.run(whole)
        return undo(whole) if stage.edits else value
