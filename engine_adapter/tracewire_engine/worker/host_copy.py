"""Arrays of one step, brought to host memory together.

What is encoded must be in host memory, as bytes. One copy a tensor would make a GPU's step wait many times, and on
any device several calls a tensor cost more than its bytes do. A `HostCopy` therefore joins all tensors of one dtype
that it is told of in advance, copies them at once, and hands out slices.

On a GPU the copy of a step is not waited for: it is under way while the next step is prepared, and what is made of its
bytes is made one step later.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import torch

from tracewire_bus.wire.arrays import array_header, array_payload, encoded_array
from tracewire_bus.wire.digests import array_digest
from tracewire_bus.wire.kinds import MAX_DEPTH, Unsavable
from tracewire_bus.wire.messages import Append
from tracewire_bus.wire.refs import DTYPES

if TYPE_CHECKING:
    from tracewire_engine.protocol.messages import Batch

__all__ = ["TORCH_DTYPES", "HostArray", "HostCopy", "PinnedCopy", "elements", "encoded_late"]

#: How many bytes the pinned memory of a copy has at least, and of how many it is kept for the next: PyTorch keeps more.
_LEAST_PINNED, _MOST_PINNED = 4096, 16 << 20
#: The names of torch's dtypes that can travel.
TORCH_DTYPES: dict[torch.dtype, str] = {
    dtype: name for name in sorted(DTYPES) if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}


def _plain(tensor: Any) -> bool:
    """Whether a tensor's elements can be joined with others': dense, and nothing left to be carried out."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


class PinnedCopy:
    """A copy of a tensor of bytes to host memory, perhaps under way.

    On a GPU it arrives in pinned memory, which is lent: making it anew costs more than copying. What is lent has a
    power of two of bytes, so that steps of a batch that grows and shrinks share a few.
    """

    #: By their size.
    _free: ClassVar[dict[int, list[tuple[torch.Tensor, torch.cuda.Event]]]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, tensor: torch.Tensor) -> None:
        self._settled: memoryview | None = None
        if not tensor.is_cuda:
            self._settled = memoryview(tensor.numpy())
            return
        room = max(_LEAST_PINNED, 1 << (tensor.nbytes - 1).bit_length())
        with self._lock:
            free = self._free.get(room)
            lent = free.pop() if free else None
        if lent is None:
            lent = torch.empty(room, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()
        self._lent, self._copied = lent
        self._pinned = self._lent[: tensor.nbytes]
        self._pinned.copy_(tensor, non_blocking=True)
        self._copied.record()

    @property
    def done(self) -> bool:
        """Whether the bytes can be read without waiting."""
        return self._settled is not None or self._copied.query()

    @property
    def settled(self) -> bool:
        """Whether they have been read before, or never were anywhere else."""
        return self._settled is not None

    def lend(self) -> memoryview:
        """The bytes, good until `release`; waits for them."""
        if self._settled is not None:
            return self._settled
        self._copied.synchronize()
        return memoryview(self._pinned.numpy())

    def fill(self, batch: Batch) -> None:
        """Put the bytes in `batch`, where they are good until `release`; waits for them."""
        batch.data = self.lend()

    def release(self) -> None:
        """End what `lend` gave."""
        if self._settled is None:
            self._settled = memoryview(b"")
            self._give_back()

    def _give_back(self) -> None:
        if self._lent.nbytes <= _MOST_PINNED:
            with self._lock:
                self._free.setdefault(self._lent.nbytes, []).append((self._lent, self._copied))

    def bytes(self) -> memoryview:
        """The bytes, to keep; waits for them. For any thread."""
        if self._settled is None:
            self._copied.synchronize()
            with self._lock:
                first = self._settled is None
                if first:
                    self._settled = memoryview(bytes(self._pinned.numpy()))
            if first:
                self._give_back()
        assert self._settled is not None
        return self._settled


class HostArray:
    """An array in host memory, or on its way there. It stands in a delta until the delta is encoded."""

    __slots__ = ("_copy", "_digest", "_dtype", "_shape", "_start", "_stop")

    def __init__(self, copy: PinnedCopy, dtype: str, shape: tuple[int, ...], start: int, stop: int) -> None:
        self._copy = copy
        self._dtype, self._shape, self._start, self._stop = dtype, shape, start, stop
        self._digest = b""

    def raw(self) -> memoryview:
        """Its elements; waits for them."""
        return self._copy.bytes()[self._start : self._stop]

    def payload(self) -> bytes:
        """Its payload, made anew."""
        return array_payload(self._dtype, self._shape, self.raw())

    def appended(self, name: str) -> bytes:
        """The encoded deltas of a step that adds it to the list `name`, and nothing else; waits for its elements."""
        head, _ = array_header(self._dtype, self._shape, self._stop - self._start)
        return b"".join((_appending(name), head, self.raw()))

    def digest(self) -> bytes:
        """Its digest, taken when it is first asked for."""
        if not self._digest:
            self._digest = array_digest(array_header(self._dtype, self._shape, self._stop - self._start)[1], self.raw())
        return self._digest

    def same(self, other: HostArray) -> bool:
        """Whether the other has the same elements, in the same shape."""
        return self.alike(other) and self.raw().tobytes() == other.raw().tobytes()

    def alike(self, other: HostArray) -> bool:
        """Whether the other has this one's dtype and shape."""
        return self._shape == other._shape and self._dtype == other._dtype


def elements(arrays: Iterable[HostArray]) -> bytes:
    """The elements of arrays, one after the other; waits for them."""
    pieces: list[memoryview] = []
    copy: PinnedCopy | None = None
    start = stop = 0
    for array in arrays:
        # Neighbours are taken in one piece.
        if array._copy is not copy or array._start != stop:
            if copy is not None:
                pieces.append(copy.bytes()[start:stop])
            copy, start = array._copy, array._start
        stop = array._stop
    if copy is not None:
        pieces.append(copy.bytes()[start:stop])
    return b"".join(pieces)


@lru_cache(maxsize=4096)
def _appending(name: str) -> bytes:
    """The encoded prefix of a step's deltas that append one item to the list `name`."""
    return msgspec.msgpack.encode([Append(path=(name,), items=[msgspec.Raw(b"")])])


def encoded_late(value: Any) -> Any:
    """For an encoder of deltas: a `HostArray` as it stands on the wire.

    Raises:
        NotImplementedError: it is something else.
    """
    if isinstance(value, HostArray):
        return encoded_array(value.payload())
    raise NotImplementedError(f"{type(value).__name__} cannot be encoded")


class HostCopy:
    """Saved values in host memory: arrays of the tensors it was primed with, and anything else on demand.

    It knows tensors by identity, so it is good for as long as they are held, and for one moment of their contents.
    Tensors of more than `threshold` bytes (0: none) are not its business: see `large_arrays.py`. On a GPU nothing is
    waited for until it is asked for, and `under_way` names the last copy that was begun.
    """

    def __init__(self, threshold: int = 0) -> None:
        self._most = threshold or math.inf
        self.under_way: PinnedCopy | None = None
        self._arrays: dict[int, HostArray] = {}
        self._copies: dict[int, torch.Tensor] = {}

    def prime(self, tensors: Iterable[Any]) -> None:
        """Copy tensors to the host, all of one dtype and device in one go. Others are left for later."""
        alike: dict[tuple[torch.dtype, torch.device, torch.Size], dict[int, torch.Tensor]] = {}
        for tensor in tensors:
            if _plain(tensor):
                kind = (tensor.dtype, tensor.device, tensor.shape)
                if kind in alike:
                    alike[kind][id(tensor)] = tensor
                else:
                    alike[kind] = {id(tensor): tensor}
        groups: dict[tuple[torch.dtype, torch.device], list[tuple[torch.Size, dict[int, torch.Tensor]]]] = {}
        for (dtype, device, shape), found in alike.items():
            size = shape.numel() * dtype.itemsize
            if dtype in TORCH_DTYPES and device.type != "meta" and 0 < size <= self._most:
                groups.setdefault((dtype, device), []).append((shape, found))
        for (dtype, device), group in groups.items():
            # Copies even of one: what is kept is how it is now.
            joined = [torch.stack(list(found.values())).view(-1) for _, found in group]
            copy = PinnedCopy((joined[0] if len(joined) == 1 else torch.cat(joined)).view(torch.uint8))
            if device.type == "cuda":
                self.under_way = copy
            start, name = 0, TORCH_DTYPES[dtype]
            for shape, found in group:
                size, plain = shape.numel() * dtype.itemsize, tuple(shape)
                for key in found:
                    self._arrays[key] = HostArray(copy, name, plain, start, start + size)
                    start += size

    def array(self, tensor: torch.Tensor) -> HostArray | None:
        """A tensor that the copy was primed with."""
        return self._arrays.get(id(tensor))

    def __call__(self, value: Any) -> Any:
        """`value` with every tensor in it in host memory."""
        return self._local(value, 0) if torch.cuda.is_available() else value

    def _local(self, value: Any, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device.type == "cpu" or value.is_meta:
                return value
            copy = self._copies.get(id(value))
            if copy is None:
                copy = self._copies[id(value)] = value.detach().cpu()
            return copy
        if depth > MAX_DEPTH:
            raise Unsavable((), f"containers nest deeper than {MAX_DEPTH} or refer to themselves")
        if type(value) is list:
            return [self._local(item, depth + 1) for item in value]
        if type(value) is tuple:
            return tuple(self._local(item, depth + 1) for item in value)
        if type(value) is dict:
            return {key: self._local(item, depth + 1) for key, item in value.items()}
        return value
