"""Copies the tensors that blocks saved in a step to host memory together.

To encode an array, the worker needs its bytes in host memory. One copy for each tensor would stall a GPU's step many
times, and on any device the calls for each tensor cost more than copying its bytes. A `HostCopy` therefore joins all
tensors of one dtype that it is told of in advance, copies them at once, and hands out slices.

On a GPU nothing waits for the copy of a step: it runs while the next step is prepared, and the worker encodes its bytes
one step later.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
import torch

from tracewire_bus.wire.arrays import array_header, array_payload, encoded_array
from tracewire_bus.wire.digests import array_digest
from tracewire_bus.wire.kinds import MAX_DEPTH, Unsavable
from tracewire_bus.wire.messages import Append
from tracewire_bus.wire.refs import DTYPES
from tracewire_engine.link.cuda_events import current_stream
from tracewire_engine.link.memory import same_bytes

if TYPE_CHECKING:
    from tracewire_engine.protocol.messages import Batch

__all__ = ["TORCH_DTYPES", "HostArray", "HostCopy", "PinnedCopy", "appended", "elements", "encoded_late"]

#: The smallest piece of pinned memory that is allocated, and the largest that is kept for later copies, in bytes.
_LEAST_PINNED, _MOST_PINNED = 4096, 16 << 20
#: The names of torch's dtypes that can travel.
TORCH_DTYPES: dict[torch.dtype, str] = {
    dtype: name for name in sorted(DTYPES) if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}


def _plain(tensor: Any) -> bool:
    """Whether a tensor can be joined with others: it is dense, without gradient, conjugation or negation pending."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


class PinnedCopy:
    """A copy of a tensor of bytes to host memory, which may still be running.

    On a GPU the copy goes to pinned memory that is reused, since allocating it costs more than copying. The pieces of
    pinned memory have sizes of a power of two, so that steps of a growing and shrinking batch share a few.
    """

    #: Free pieces of pinned memory, each with its event and the part that was used last, by size.
    _free: ClassVar[dict[int, list[tuple[torch.Tensor, torch.cuda.Event, torch.Tensor]]]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, tensor: torch.Tensor) -> None:
        self._settled: memoryview | None = None
        self._address = 0
        if not tensor.is_cuda:
            self._settled = memoryview(tensor.numpy())
            return
        room = max(_LEAST_PINNED, 1 << (tensor.nbytes - 1).bit_length())
        with self._lock:
            free = self._free.get(room)
            lent = free.pop() if free else None
        if lent is None:
            piece = torch.empty(room, dtype=torch.uint8, pin_memory=True)
            lent = piece, torch.cuda.Event(), piece
        self._lent, self._copied, used = lent
        # Steps of one plan copy as many bytes each, and making a view takes as long as beginning a copy.
        self._pinned = used if used.nbytes == tensor.nbytes else self._lent[: tensor.nbytes]
        self._pinned.copy_(tensor, non_blocking=True)
        self._copied.record(current_stream(tensor.device))

    @property
    def done(self) -> bool:
        """Whether the bytes can be read without waiting."""
        return self._settled is not None or self._copied.query()

    @property
    def settled(self) -> bool:
        """Whether the bytes are in ordinary host memory: they were read before, or were on the host from the start."""
        return self._settled is not None

    def lend(self) -> memoryview:
        """The bytes, valid until `release`. Waits for the copy."""
        if self._settled is not None:
            return self._settled
        self._copied.synchronize()
        return memoryview(self._pinned.numpy())

    def fill(self, batch: Batch) -> None:
        """Set the data of `batch` to the bytes, which are valid until `release`. Waits for the copy."""
        batch.data = self.lend()

    def release(self) -> None:
        """Give the pinned memory back. The bytes that `lend` returned are no longer valid."""
        if self._settled is None:
            self._settled = memoryview(b"")
            self._give_back()

    def _give_back(self) -> None:
        if self._lent.nbytes <= _MOST_PINNED:
            with self._lock:
                self._free.setdefault(self._lent.nbytes, []).append((self._lent, self._copied, self._pinned))

    def bytes(self) -> memoryview:
        """The bytes, valid for good. Waits for the copy. Any thread may call it."""
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

    def address(self) -> int:
        """Where the bytes lie, for as long as this object lives. Waits for the copy."""
        if not self._address:
            self._address = np.frombuffer(self.bytes(), np.uint8).ctypes.data
        return self._address


class HostArray:
    """An array whose copy to host memory is done or running. A delta holds it until the delta is encoded."""

    __slots__ = ("_copy", "_digest", "_dtype", "_shape", "_start", "_stop")

    def __init__(self, copy: PinnedCopy, dtype: str, shape: tuple[int, ...], start: int, stop: int) -> None:
        self._copy = copy
        self._dtype, self._shape, self._start, self._stop = dtype, shape, start, stop
        self._digest = b""

    @property
    def nbytes(self) -> int:
        """How many bytes its elements take."""
        return self._stop - self._start

    def raw(self) -> memoryview:
        """The array's elements as bytes. Waits for the copy."""
        return self._copy.bytes()[self._start : self._stop]

    def payload(self) -> bytes:
        """The array's payload on the wire. Each call encodes it anew."""
        return array_payload(self._dtype, self._shape, self.raw())

    def digest(self) -> bytes:
        """The array's digest, which the first call computes."""
        if not self._digest:
            self._digest = array_digest(array_header(self._dtype, self._shape, self._stop - self._start)[1], self.raw())
        return self._digest

    def same(self, other: HostArray) -> bool:
        """Whether the other array has the same dtype, shape and elements. Waits for both copies."""
        return self.alike(other) and self.raw().tobytes() == other.raw().tobytes()

    def is_in(self, tensor: Any) -> bool:
        """Whether a value is a tensor in host memory with this dtype and shape, and these elements without gaps.

        Neither is copied. Of any other value this may be false although it is equal.
        """
        return (
            _plain(tensor)
            and tensor.is_cpu
            and tensor.shape == self._shape
            and TORCH_DTYPES.get(tensor.dtype) == self._dtype
            and tensor.is_contiguous()
            and same_bytes(tensor.data_ptr(), self._copy.address() + self._start, self.nbytes)
        )

    def alike(self, other: HostArray) -> bool:
        """Whether the other array has the same dtype and shape."""
        return self._shape == other._shape and self._dtype == other._dtype


def elements(arrays: Iterable[HostArray]) -> bytes:
    """The elements of arrays as bytes, one array after the other. Waits for their copies."""
    pieces: list[memoryview] = []
    copy: PinnedCopy | None = None
    start = stop = 0
    for array in arrays:
        # Arrays that lie next to each other in one copy are taken in one piece.
        if array._copy is not copy or array._start != stop:
            if copy is not None:
                pieces.append(copy.bytes()[start:stop])
            copy, start = array._copy, array._start
        stop = array._stop
    if copy is not None:
        pieces.append(copy.bytes()[start:stop])
    return b"".join(pieces)


def appended(name: str, arrays: Iterable[HostArray]) -> bytes:
    """The encoded deltas of a step that only appends these arrays to the list `name`. Waits for their copies."""
    pieces: list[bytes | memoryview] = [b""]
    for array in arrays:
        start, stop = array._start, array._stop
        pieces += array_header(array._dtype, array._shape, stop - start)[0], array._copy.bytes()[start:stop]
    pieces[0] = _appending(name, len(pieces) // 2)
    return b"".join(pieces)


@lru_cache(maxsize=4096)
def _appending(name: str, count: int) -> bytes:
    """The encoded prefix of a step's deltas that append so many items to the list `name`."""
    return msgspec.msgpack.encode([Append(path=(name,), items=[msgspec.Raw(b"")] * count)])


def encoded_late(value: Any) -> Any:
    """The `enc_hook` of the encoder of deltas: a `HostArray` in its form on the wire.

    Raises:
        NotImplementedError: `value` is not a `HostArray`.
    """
    if isinstance(value, HostArray):
        return encoded_array(value.payload())
    raise NotImplementedError(f"{type(value).__name__} cannot be encoded")


class HostCopy:
    """Brings saved values to host memory: the tensors given to `prime` together, and any other value on demand.

    It finds tensors by identity. So it is valid while the caller holds the tensors and their contents do not change.
    It leaves tensors of more than `threshold` bytes (0 for no limit) to `large_arrays.py`. On a GPU it waits for a copy
    only when the bytes are asked for; `under_way` is the copy that was begun last.
    """

    def __init__(self, threshold: int = 0) -> None:
        self._most = threshold or math.inf
        self.under_way: PinnedCopy | None = None
        self._arrays: dict[int, HostArray] = {}
        self._copies: dict[int, torch.Tensor] = {}

    def prime(self, tensors: Iterable[Any]) -> None:
        """Begin the copies of tensors to the host: one copy for each dtype and device.

        Tensors that are not dense, are empty, large, or of a dtype that cannot travel are left out.
        """
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
            # `stack` copies even a single tensor, so that later changes to it do not matter.
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
        """The host copy of a tensor that was given to `prime`, or `None`."""
        return self._arrays.get(id(tensor))

    def __call__(self, value: Any) -> Any:
        """`value` with every tensor in it copied to host memory. Waits for the copies."""
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
