"""Serves declared interventions at the taps of a CUDA graph, without Python there.

A graph that breaks at each tap costs the model's thread a launch and some Python for each tap in each step, also where
no request of the step asks for anything. So the worker has a second graph of each batch size, which is whole. In it
stands a kernel at each tap (`tap_kernel.py`). The kernel reads a table of the step: which rows are copied to a buffer,
and which vectors are added to which rows. A step whose interventions fit into the table runs as one launch, whatever
the number of layers, and the reads are taken from the buffer afterwards. The table is written when the plan changes.

These fit: what only reads, and one `Steer` of a request at a location, whose reads there are all before it or all after
it. Both may have conditions, but on no probe. Before each step, the flags of a `Steer`'s rows are written by where its
condition holds. What is read where a condition does not hold is left out afterwards. Other steps replay the graph with
breaks: those with blocks, with other edits, with what depends on a probe, and with values of another shape than the
residual stream.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch

from tracewire_bus.wire.messages import Steer

from .conditions import on_device
from .groups import EditGroup, Group, LocationValues, ReadGroup
from .ops import Op
from .tap_rows import ADD, AFTER, READ, SUM

__all__ = ["StepTable", "TapBuffers", "VectorPool", "graph_rows", "made_buffers"]

logger = logging.getLogger("vllm.tracewire")

#: Most bytes of the vectors of all live requests.
_POOL_BYTES: Final = 256 << 20
#: Rows are a multiple of this, so that each tap's part of a table is aligned alike.
_ALIGNMENT: Final = 16


class _Restriction:
    """The flags of the rows of an edit with a condition: where it holds, and where not.

    Args:
        tap: where the edit is.
        group: the edit.
        flags: of all rows at the tap.
    """

    def __init__(self, tap: int, group: Group, flags: np.ndarray[Any, Any]) -> None:
        assert group.condition is not None
        self._tap, self._condition, device = tap, group.condition, group.device
        held = flags[group.rows.numbers]
        self._rows = on_device(torch.from_numpy(group.rows.numbers), device)
        self._held = on_device(torch.from_numpy(held), device)
        self._left = on_device(torch.from_numpy(held & ~(ADD | AFTER)), device)

    def write(self, flags: torch.Tensor) -> None:
        """Write them for the step under way, to the flags of all taps `[taps, rows]`."""
        flags[self._tap].index_copy_(0, self._rows, torch.where(self._condition.mask(), self._held, self._left))


class StepTable:
    """What the taps' kernels do with each row, in all steps of one plan.

    Attributes:
        numbers: int32 `[2, taps, rows]`: the flags of each row, and the place of its vector in the pool.
        adds: whether a vector is added in each step, whatever the conditions.
    """

    def __init__(self, taps: int, rows: int, pool: VectorPool) -> None:
        self.numbers = np.zeros((2, taps, rows), np.int32)
        self.adds = False
        self._pool = pool
        #: The edits with conditions, each with its tap.
        self._conditional: list[tuple[int, Group]] = []
        #: The places of the vectors of groups with the same members, of which an intervention has one a location.
        self._places: dict[int, np.ndarray[Any, Any]] = {}

    @cached_property
    def uses(self) -> frozenset[str]:
        """What the kernels do in steps with this table: `"reads"` and `"edits"`. For a complete table."""
        flags = self.numbers[0]
        return frozenset(name for name, flag in (("reads", READ), ("edits", ADD)) if np.any(flags & flag))

    def add(self, tap: int, group: Group) -> bool:
        """Add a group at a tap, behind those that were added. Returns `False` if it does not fit."""
        if not group.steady or not group.recordable or group.watch is not None:
            return False
        if group.condition is not None and not group.condition.known_before:
            return False
        rows = group.rows.where
        flags = self.numbers[0, tap, rows]
        if isinstance(group, ReadGroup):
            added = self._read(flags, residual=group.residual)
        elif isinstance(group, EditGroup):
            added = self._edit(flags, group, self.numbers[1, tap])
        else:
            return False
        if added is None:
            return False
        self.numbers[0, tap, rows] = added
        if group.condition is not None and group.edits:
            self._conditional.append((tap, group))
        return True

    @cached_property
    def restrictions(self) -> list[_Restriction]:
        """The flags of rows whose edits have conditions. For a complete table."""
        return [_Restriction(tap, group, self.numbers[0, tap]) for tap, group in self._conditional]

    @staticmethod
    def _read(flags: np.ndarray[Any, Any], *, residual: bool) -> np.ndarray[Any, Any] | None:
        wanted = np.where(flags & ADD, READ | AFTER, READ) | (SUM if residual else 0)
        # A row has one place in the buffer, so all its reads must be of the same value.
        others = (flags & READ != 0) & (flags & (READ | AFTER | SUM) != wanted)
        return None if bool(others.any()) else flags | wanted

    def _edit(
        self, flags: np.ndarray[Any, Any], group: EditGroup, places: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any] | None:
        if not isinstance(group.one, Steer) or (flags & ADD).any():
            return None
        found = self._places.get(id(group.members))
        if found is None:
            # Requests that bring the same interventions share them.
            of_ops = {op: self._pool.place(op) for op in group.members.distinct_ops()}
            if None in of_ops.values():
                return None
            of_members = [of_ops[op] for op in group.members.ops()]
            found = np.repeat(np.array(of_members, np.int32), group.rows.counts)
            self._places[id(group.members)] = found
        places[group.rows.where] = found
        if not any(op.numbers[0] for op in group.members.distinct_ops()):
            # Of strength 0: it adds nothing.
            return flags
        self.adds |= group.condition is None
        return flags | ADD


class VectorPool:
    """The scaled vectors of the `Steer`s of live requests, on the device. Each has its place as long as it lives.

    So a request that joins or leaves the batch costs what its own vectors cost.
    """

    def __init__(self, places: int, width: int, device: torch.device) -> None:
        #: float32 `[places, width]`.
        self.rows = torch.zeros(places, width, dtype=torch.float32, device=device)
        self._free = list(range(places))[::-1]
        self._places: dict[weakref.ref[Op], int] = {}
        #: The `Steer`s whose vectors are to be written, by place. A plan that did not fit may have placed them, so they
        #: are not kept alive.
        self._unwritten: dict[int, weakref.ref[Op]] = {}

    def place(self, op: Op) -> int | None:
        """The place of a `Steer`'s vector; `None` if it does not fit."""
        reference = weakref.ref(op)
        found = self._places.get(reference)
        if found is not None:
            return found
        if not self._free or op.matrix is None or op.matrix.shape[-1] != self.rows.shape[-1]:
            return None
        found = self._free.pop()
        self._places[weakref.ref(op, self._release)] = found
        self._unwritten[found] = reference
        return found

    def _release(self, reference: weakref.ref[Op]) -> None:
        place = self._places.pop(reference)
        self._unwritten.pop(place, None)
        self._free.append(place)

    def write(self) -> None:
        """Write the vectors that have got a place since. Steps that were launched before read what stood there."""
        unwritten, self._unwritten = self._unwritten, {}
        for place, reference in unwritten.items():
            if (op := reference()) is not None:
                assert op.matrix is not None
                # Not by `scaled_vector`, which takes memory of the device.
                torch.mul(op.matrix[0], op.numbers[0], out=self.rows[place])


class TapBuffers:
    """The buffers of an engine's taps: for each a row for each token that a whole graph computes.

    Args:
        taps: the locations.
        rows: the most tokens of a step that a whole graph computes.
        width: features of the residual stream.
        dtype: of the residual stream.
        device: where the model runs.
        serve: the kernel.
        sums: whether the residual stream is the sum of a location's two tensors, if there are two.
        sharded: whether each rank holds a part of the values at a location.
    """

    def __init__(
        self,
        taps: Iterable[str],
        rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        serve: Callable[..., None],
        *,
        sums: bool = True,
        sharded: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._places = {tap: place for place, tap in enumerate(sorted(tap for tap in taps if not sharded(tap)))}
        #: Features of the residual stream.
        self.width = width
        self._serve, self._sums = serve, sums
        self._rows = -(-rows // _ALIGNMENT) * _ALIGNMENT
        count = max(1, len(self._places))
        self._buffer = torch.zeros(count, self._rows, width, dtype=dtype, device=device)
        self._numbers = torch.zeros(2, count, self._rows, dtype=torch.int32, device=device)
        self._pool = VectorPool(max(1, min(count * self._rows, _POOL_BYTES // (4 * width))), width, device)
        #: The locations at which a whole graph has the kernel; and those at which one of the graphs lacks it.
        self._locations: set[str] = set()
        self._unserved: set[str] = set()
        #: The table on the device, if one was used; and one of steps in which the kernels do nothing.
        self._current: StepTable | None = None
        self.nothing = StepTable(count, self._rows, self._pool)

    def warm_up(self) -> None:
        """Compile the kernel, for values with one half and with two."""
        rows = self._buffer[0, :_ALIGNMENT]
        for residual in (None, torch.zeros_like(rows)):
            self._serve(torch.zeros_like(rows), residual, rows, self._pool.rows, *self._numbers[:, 0])

    def launch(self, location: str, value: Any) -> None:
        """Launch the kernel for a location's value, if the value has the shape and dtype of the residual stream.

        While a graph is captured, this puts the kernel into the graph.
        """
        tap = self._places.get(location)
        halves = self._halves(value, location.rpartition(".")[2])
        if tap is None or halves is None:
            self._unserved.add(location)
            return
        if not self.has_room(halves[0].shape[0]):
            # Steps of so many tokens replay the graph with breaks.
            return
        self._locations.add(location)
        self._serve(*halves, self._buffer[tap], self._pool.rows, self._numbers[0, tap], self._numbers[1, tap])

    def _halves(self, value: Any, side: str) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        try:
            found = LocationValues(value, side, 0, self._sums)
        except ValueError:
            return None
        return (found.hidden, found.residual) if all(map(self._fits, found.halves(residual=True))) else None

    def _fits(self, half: torch.Tensor) -> bool:
        """Whether the kernel can serve a tensor. It was compiled for contiguous ones, aligned to 16 bytes."""
        alike = half.dim() == 2 and half.shape[1] == self.width and half.dtype == self._buffer.dtype
        return bool(alike and half.is_contiguous() and half.data_ptr() % 16 == 0)

    def has_room(self, tokens: int) -> bool:
        """Whether a graph of so many tokens, padding included, has the kernels."""
        return tokens <= self._rows

    def table(self, groups: Mapping[str, Iterable[Group]], total: int) -> StepTable | None:
        """The table of a step of `total` tokens with these groups by location; `None` if a group does not fit."""
        if not self.has_room(total):
            return None
        table = StepTable(len(self._buffer), self._rows, self._pool)
        for location, members in groups.items():
            if location not in self._locations or location in self._unserved:
                return None
            if not all(table.add(self._places[location], group) for group in members):
                return None
        return table

    def use(self, table: StepTable) -> None:
        """Have the kernels do what a table says from now on."""
        if table is self._current:
            return
        self._current = table
        numbers = torch.from_numpy(table.numbers)
        if self._numbers.is_cuda:
            numbers = numbers.pin_memory()
        self._numbers.copy_(numbers, non_blocking=True)
        self._pool.write()

    def used(self, table: StepTable, uses: frozenset[str]) -> frozenset[str]:
        """Those of a table's uses that the step under way has: an edit whose condition does not hold adds nothing.

        For the table in use. Waits for the device if all edits have conditions.
        """
        if "edits" not in uses or table.adds or bool((self._numbers[0] & ADD).any()):
            return uses
        return uses - {"edits"}

    def restrict(self, table: StepTable) -> None:
        """Have the kernels edit only where the conditions of the step under way hold. For the table in use."""
        for one in table.restrictions:
            one.write(self._numbers[0])

    def place(self, location: str) -> int:
        """The place of a location's buffer among all of them."""
        return self._places[location]

    def of_taps(self, locations: Iterable[str]) -> torch.Tensor:
        """The rows `[locations, rows, hidden]` that the last step left at these locations, which may repeat."""
        places = [self._places[location] for location in locations]
        if places == list(range(places[0], places[0] + len(places))):
            return self._buffer[places[0] : places[0] + len(places)]
        return torch.stack([self._buffer[place] for place in places])

    def values(self, location: str) -> torch.Tensor:
        """The rows `[rows, hidden]` that the last step left at a location. Rows without reads are of earlier steps."""
        return self._buffer[self._places[location]]


def graph_rows(config: Any) -> int:
    """The most tokens of a step whose requests all generate, padded to a CUDA graph; 0 if vLLM captures no graphs.

    Each request has a token, and one for each draft. With drafts, vLLM rounds the sizes of its graphs up to steps of
    whole requests, but to no more than the greatest size.

    Args:
        config: vLLM's configuration.
    """
    sizes: list[int] = config.compilation_config.cudagraph_capture_sizes or []
    if not sizes:
        return 0
    tokens: int = 1 + config.num_speculative_tokens
    most = config.scheduler_config.max_num_seqs * tokens
    found = min((size for size in sizes if size >= most), default=max(sizes))
    return min(-(-found // tokens) * tokens, max(sizes))


def made_buffers(
    taps: Iterable[str],
    config: Any,
    device: torch.device,
    *,
    sums: bool,
    sharded: Callable[[str], bool],
) -> TapBuffers | None:
    """The buffers of a worker with vLLM's configuration; `None` where no whole graphs can be used, or the kernel fails.

    The kernel is compiled here, because nothing can be compiled while a graph is captured.
    """
    rows = graph_rows(config) if device.type == "cuda" else 0
    if not rows:
        return None
    model = config.model_config
    if any(getattr(model, name, False) for name in ("is_hybrid", "has_inner_state", "is_attention_free")):
        # A step of a model with a recurrent state cannot run twice, as `graph_proof.py` needs.
        return None
    try:
        from .tap_kernel import serve_rows

        buffers = TapBuffers(
            taps, rows, model.get_hidden_size(), model.dtype, device, serve_rows, sums=sums, sharded=sharded
        )
        buffers.warm_up()
    except Exception:
        logger.exception("the kernel for taps does not work here: every step stops at each tap")
        return None
    return buffers
