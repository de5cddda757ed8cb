"""What pipeline stages tell each other about blocks in hosts, all of which belong to the last stage.

An earlier stage has no host. How a step goes depends on the blocks of its requests, which are the same on all stages:

- If all of them only read, their source tells all locations that they may ask for (`reading.py`). The earlier stage
  copies, at those of its own locations, the rows of these requests, and goes on. When its part of the step is over, it
  sends them to the last stage in one message, `StagePart`. It waits for nothing.
- If one of them may write, the earlier stage asks. It tells the last stage that it begins (`StageBegan`) and waits
  until that one has finished the step before, and says where its hosts want something (`StepBegan`). At each such
  location it sends the rows (`StageReached`), and where blocks may write, it waits for what they leave (`Served`).
  Meanwhile it calls its modules for blocks that ask for it (`Called`, `StageAnswer`). `StagePart` ends the step. So the
  stages work on one such step at a time.

If a stage has several tensor-parallel ranks, its first one does so, and passes on to the others what it is told.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import msgspec
import torch
from nnsight.intervention.source import NO_SKIP

from tracewire_bus.wire.messages import Failure
from tracewire_engine.link.shared_rows import RowBytes, aligned, pack_value, unpack_value
from tracewire_engine.protocol.block_host import Shape, Shared
from tracewire_engine.worker.host_copy import PinnedCopy

from .reading import Account
from .rows import StepRows

__all__ = [
    "HostedRequests",
    "Names",
    "Pieces",
    "StageAnswer",
    "StageBegan",
    "StageMessage",
    "StagePart",
    "StageReached",
    "named",
    "packed",
    "packed_whole",
    "stand_in",
    "unpacked",
]


class StageReached(msgspec.Struct, array_like=True, tag="reached"):
    """A location that a stage has reached.

    `names` are of locations that no message of the stage has named before. `place` is the location's place among all
    names, and `before` the places of those that the stage has passed since the last message, two bytes each. The
    tensors of `value` have the shapes that they have on the stage. Of a tensor with rows of requests, the bytes have
    the rows of requests with blocks alone. `waits`: the stage waits for what the blocks leave. `failures` are of
    requests whose rows the stage could not put into a value.
    """

    stage: int
    names: list[str]
    place: int
    before: bytes
    value: Shared
    waits: bool = False
    failures: dict[str, Failure] = {}


class StageBegan(msgspec.Struct, array_like=True, tag="began"):
    """A stage begins a step in which blocks may write: each request, its tokens, and the index of what it samples."""

    stage: int
    requests: list[tuple[str, int, int]]


class StagePart(msgspec.Struct, array_like=True, tag="part"):
    """A stage's part of a step is over. `reached` is of a step in which blocks only read. Else as `StageReached`."""

    stage: int
    names: list[str]
    reached: list[StageReached]
    passed: bytes
    failures: dict[str, Failure] = {}


class StageAnswer(msgspec.Struct, array_like=True, tag="answer"):
    """What a module of a stage has returned to a block, or the error that it has raised: its type and message."""

    stage: int
    value: Shared | None = None
    error: tuple[str, str] | None = None


StageMessage: TypeAlias = StageReached | StageBegan | StagePart | StageAnswer


class HostedRequests:
    """The requests whose blocks run in hosts: the same ones on all stages."""

    def __init__(self) -> None:
        self._reads: dict[str, frozenset[str]] = {}
        self._waited: set[str] = set()

    def add(self, request_id: str, account: Account) -> None:
        """Take a new request with blocks."""
        if account.reads is None:
            self._waited.add(request_id)
        else:
            self._reads[request_id] = account.reads

    def discard(self, request_id: str) -> None:
        """Forget a request that is over."""
        self._reads.pop(request_id, None)
        self._waited.discard(request_id)

    def wait_in(self, scheduled: Collection[str]) -> bool:
        """Whether a step with these requests has blocks that may write."""
        return any(request_id in scheduled for request_id in self._waited)

    def rows_of(self, scheduled: Mapping[str, int], order: Iterable[str]) -> StepRows | None:
        """Where the rows of these requests lie in a step; `None` if it has none of them.

        Args:
            scheduled: how many tokens the step has of each request.
            order: the requests of the step, in the order of the batch.
        """
        spans, places, start, place = [], [], 0, 0
        for request_id in order:
            count = scheduled.get(request_id)
            if count is None:
                continue
            if request_id in self._reads or request_id in self._waited:
                spans.append((start, count))
                places.append(place)
            start, place = start + count, place + 1
        return StepRows(spans, places, start, place) if spans else None

    def asking(self, location: str, scheduled: Collection[str]) -> list[str]:
        """The requests of a step whose blocks may ask for a location."""
        found = [*self._waited, *[name for name, reads in self._reads.items() if location in reads]]
        return [name for name in found if name in scheduled]

    def reads_in(self, scheduled: Collection[str]) -> frozenset[str]:
        """The locations that blocks of the step's requests may ask for, where all of them only read."""
        return frozenset[str]().union(*[reads for name, reads in self._reads.items() if name in scheduled])


class Names:
    """Numbers for locations."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._new: list[str] = []

    def place(self, location: str) -> int:
        """The place of a location, among the names of all messages."""
        place = self._places.get(location)
        if place is None:
            place = self._places[location] = len(self._places)
            self._new.append(location)
        return place

    def take(self) -> list[str]:
        """The names that no message has had."""
        new, self._new = self._new, []
        return new


class Pieces:
    """Copies of tensors for a message, which may still be on their way from a GPU."""

    def __init__(self) -> None:
        self._copies: list[tuple[int, PinnedCopy]] = []
        self.size = 0
        self.late = False

    def add(self, tensor: torch.Tensor) -> int:
        """Copy a tensor. Returns where it will lie among the bytes."""
        # A copy, since the model may change the value in place.
        flat = tensor.detach().contiguous().clone().view(-1).view(torch.uint8)
        start = self.size
        if flat.numel():
            self._copies.append((start, PinnedCopy(flat)))
        self.late = self.late or flat.is_cuda
        self.size += aligned(flat.numel())
        return start

    def bytes(self) -> bytearray:
        """All bytes. Waits for the copies."""
        data = bytearray(self.size)
        for start, copy in self._copies:
            held = copy.lend()
            data[start : start + len(held)] = held
            del held
            copy.release()
        return data


def packed_whole(value: Any, pieces: Pieces) -> Shared:
    """A value without rows of requests, such as the result of a call, for a message."""

    def keep(tensor: torch.Tensor) -> Shape:
        return Shape(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), pieces.add(tensor))

    return pack_value(value, keep, lambda other: type(other).__name__)


def packed(value: Any, rows: StepRows, pieces: Pieces) -> Shared:
    """A value at a location, for a message.

    Args:
        value: the model's.
        rows: of requests with blocks.
        pieces: takes the bytes of tensors.
    """

    def keep(tensor: torch.Tensor) -> Shape:
        place = rows.of(tensor, by_request=False)
        kept = tensor
        if place is not None:
            parts = [tensor.narrow(place[0], first, count) for first, count in place[1]]
            kept = parts[0] if len(parts) == 1 else torch.cat(parts, dim=place[0])
        return Shape(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), pieces.add(kept))

    return pack_value(value, keep, lambda other: None if other is NO_SKIP else type(other).__name__)


def unpacked(value: Shared, rows: StepRows, data: RowBytes) -> Any:
    """The value of `packed`, in which the rows of requests with blocks are filled."""
    return unpack_value(value, partial(_whole, rows, data), stand_in)


def _whole(rows: StepRows, data: RowBytes, _: int, shape: Shape) -> torch.Tensor:
    whole = torch.empty(shape.shape, dtype=getattr(torch, shape.dtype))
    place = rows.of(whole, by_request=False)
    if place is None:
        return data.read(shape)
    axis, spans = place
    sizes = list(shape.shape)
    sizes[axis] = sum(count for _, count in spans)
    given, start = data.read(Shape(shape.dtype, tuple(sizes), shape.start)), 0
    for first, count in spans:
        whole.narrow(axis, first, count).copy_(given.narrow(axis, start, count))
        start += count
    return whole


def stand_in(name: Any) -> Any:
    """Stands for an object of another stage, of a class of this name."""
    return NO_SKIP if name is None else type(str(name), (), {})()


def named(places: bytes, names: Sequence[str]) -> list[str]:
    """The locations at these places."""
    return [names[place] for place in array("H", places)]
