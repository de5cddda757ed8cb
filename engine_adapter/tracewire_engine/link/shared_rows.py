"""Tensors in memory that a worker shares with one process that runs blocks.

The worker makes the memory and seals its size, so that the other process can neither shrink nor grow it. Each process
copies what it takes out of the memory before it uses it, so what the other one writes there later changes nothing.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from tracewire_engine.protocol.block_host import Shape, Shared

from .memory import copy_bytes, same_bytes

__all__ = [
    "OPAQUE",
    "CopiedRows",
    "RowBytes",
    "RowMemory",
    "SharedValueError",
    "aligned",
    "pack_value",
    "sealed_memory",
    "size_of",
    "tensors_alone",
    "unpack_value",
]

#: Where a tensor may begin: at multiples of this.
_ALIGNED = 64

#: Up to which byte memory is given out, unless one value needs more.
_TURN = 32 << 20

#: Before how many pieces a gap is looked for at first.
_LOOKED_AT = 64

#: The kinds of a skeleton's nodes. All but plain values are lists that begin with one of these.
_TENSOR, _TUPLE, _LIST, _DICT, _OTHER = range(5)

#: The name of the kind of value that stands for one that cannot be shared.
OPAQUE = _OTHER

#: How deep values may nest, and how many dimensions a tensor may have.
_DEPTH, _DIMENSIONS = 16, 64

_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))
}


def aligned(size: int) -> int:
    """The bytes that a tensor of `size` bytes takes, with those before the next one."""
    return -(-size // _ALIGNED) * _ALIGNED


class SharedValueError(ValueError):
    """A value does not fit into the shared memory, or what the other process sent is no value."""


class RowBytes:
    """Tensors among these bytes, which another process has written.

    Args:
        data: one axis of `torch.uint8`.
    """

    def __init__(self, data: torch.Tensor) -> None:
        self._bytes, self.size = data, data.numel()
        self._array, self._address = data.numpy(), data.data_ptr()

    @classmethod
    def of(cls, parts: Sequence[bytes]) -> RowBytes:
        """The bytes of a message: its only part, if it has one."""
        data = bytearray(parts[0]) if parts else bytearray()
        return RowBytes(torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8))

    def read(self, shape: Shape) -> torch.Tensor:
        """A copy of a tensor.

        Raises:
            SharedValueError: there is no such tensor.
        """
        size = self.check(shape)
        found = torch.empty(shape.shape, dtype=_DTYPES[shape.dtype])
        if size:
            copy_bytes(found.data_ptr(), self._address + shape.start, size)
        return found

    def check(self, shape: Shape) -> int:
        """Check that a tensor lies in this memory. Returns how many bytes it takes.

        Raises:
            SharedValueError: there is no such tensor.
        """
        size = size_of(shape)
        if shape.start < 0 or shape.start % _ALIGNED or shape.start + size > self.size:
            raise SharedValueError(f"a tensor lies outside the shared memory: {shape!r}"[:200])
        return size

    def rows(self, start: int, count: int, size: int) -> np.ndarray[Any, Any]:
        """So many rows of `size` bytes each, from byte `start` on, which the other process may change at any time.

        The caller has checked that they lie in this memory, and copies them, once.
        """
        found: np.ndarray[Any, Any] = self._array[start : start + count * size].reshape(count, size)
        return found

    def check_apart(self, shapes: Sequence[Shape]) -> None:
        """Check that tensors that another process has written lie apart: copies of them take no more than this memory.

        Raises:
            SharedValueError: they do not, or there is no such tensor.
        """
        end = 0
        for shape in sorted(shapes, key=lambda one: one.start):
            size = size_of(shape)
            if size and shape.start < end:
                raise SharedValueError("two tensors share their memory")
            end = max(end, shape.start + size)


class CopiedRows:
    """Copies of tensors for a message: their bytes, one behind the other."""

    def __init__(self) -> None:
        self._pieces: list[torch.Tensor] = []
        self._size = 0

    def add(self, tensor: torch.Tensor) -> Shape:
        """Add a tensor that lies on the CPU, and return where it lies among the bytes."""
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        start = self._size
        self._size += aligned(flat.numel())
        self._pieces += [flat, torch.empty(self._size - start - flat.numel(), dtype=torch.uint8)]
        return Shape(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start)

    def bytes(self) -> torch.Tensor:
        """All bytes, as one axis of `torch.uint8`."""
        return torch.cat(self._pieces) if self._pieces else torch.empty(0, dtype=torch.uint8)


class _Given(NamedTuple):
    """A piece of memory that was given out: how many bytes there were with it, and its first byte."""

    taken: int
    start: int


def sealed_memory(size: int) -> int:
    """A descriptor of new memory of `size` bytes, which nobody can shrink or grow."""
    descriptor = os.memfd_create("tracewire-rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


class RowMemory(RowBytes):
    """A piece of memory that two processes share, into which one of them writes.

    `taken` counts all bytes ever given out, and `returned` those of them that the reader no
    longer needs.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._map = mmap.mmap(descriptor, size)
        super().__init__(torch.frombuffer(self._map, dtype=torch.uint8))
        self.descriptor = descriptor
        self.taken = self.returned = 0
        #: The pieces that were given out, the oldest first; and where each lies, by their first bytes.
        self._given: deque[_Given] = deque()
        self._places: list[tuple[int, int]] = []

    @classmethod
    def create(cls, size: int) -> Self:
        """Make `size` bytes of memory, none of which takes room before it is written."""
        return cls(sealed_memory(size), size)

    def room(self, size: int) -> int | None:
        """Where `size` bytes can be written: the first byte. `None` while the reader still needs too many others.

        Bytes near the beginning come first: memory that was written a moment ago takes less time to write again.
        """
        size = aligned(size)
        given, places, returned = self._given, self._places, self.returned
        while given and given[0].taken <= returned:
            first = given.popleft()
            del places[bisect_left(places, (first.start, 0))]
        start = self._gap(size, _LOOKED_AT)
        if start is None and len(places) > _LOOKED_AT:
            start = self._gap(size, len(places))
        if start is None:
            return None
        self.taken += size
        if size:
            given.append(_Given(self.taken, start))
            insort(places, (start, start + size))
        return start

    def _gap(self, size: int, most: int) -> int | None:
        """The first byte of `size` free ones: before one of the first `most` pieces, or behind the last one."""
        places, start = self._places, 0
        for first, end in islice(places, most):
            if first - start >= size:
                return start
            start = end
        if len(places) > most:
            start = places[-1][1]
        limit = min(self.size, max(_TURN, 2 * size)) if places else self.size
        return start if start + size <= limit else None

    def reset(self) -> None:
        """Count all bytes as returned."""
        self.returned = self.taken

    def write(self, tensor: torch.Tensor, start: int) -> None:
        """Copy a tensor's elements to byte `start` and on."""
        if tensor.numel():
            flat = self._bytes[start : start + tensor.nbytes].view(tensor.dtype)
            flat.view(tensor.shape).copy_(tensor)

    def put(self, data: memoryview, start: int) -> None:
        """Copy bytes to byte `start` and on."""
        self._map[start : start + len(data)] = data

    def put_rows(self, values: np.ndarray[Any, Any], rows: Any, start: int, size: int) -> None:
        """Copy rows of several tensors to byte `start` and on.

        Args:
            values: bytes, by tensor, row, and byte of the row.
            rows: which of the rows, as a slice or as their indices.
            start: the first byte.
            size: from one tensor's first byte to the next one's.
        """
        tensors, _, width = values.shape
        if type(rows) is slice:
            values = values[:, rows]
            np.ndarray(values.shape, np.uint8, self._map, start, (size, width, 1))[...] = values
            return
        there = np.ndarray((tensors, len(rows), width), np.uint8, self._map, start, (size, width, 1))
        # All indices are rows, and the other modes copy twice.
        if values.flags.c_contiguous and there.flags.c_contiguous:
            values.take(rows, axis=1, out=there, mode="clip")
            return
        for own, given in zip(there, values, strict=True):
            given.take(rows, axis=0, out=own, mode="clip")

    def equals(self, tensor: torch.Tensor, shape: Shape) -> bool:
        """Whether a tensor has the very bytes that lie there, NaN included."""
        size, own = tensor.nbytes, tensor.contiguous()
        if shape.start + size > self.size:
            return False
        return same_bytes(own.data_ptr(), self._address + shape.start, size)

    def close(self) -> None:
        """Let go of the memory, once no tensor refers to it."""
        del self._bytes, self._array
        os.close(self.descriptor)


def size_of(shape: Shape) -> int:
    """How many bytes a tensor takes.

    Raises:
        SharedValueError: no tensor has this dtype and shape.
    """
    dtype = _DTYPES.get(shape.dtype)
    if dtype is None or len(shape.shape) > _DIMENSIONS or any(not 0 <= size < 1 << 48 for size in shape.shape):
        raise SharedValueError(f"no tensor has this dtype and shape: {shape!r}"[:200])
    size: int = dtype.itemsize
    for length in shape.shape:
        size *= length
    return size


Writer = Callable[[torch.Tensor], Shape]


def pack_value(value: Any, write: Writer, other: Callable[[Any], Any]) -> Shared:
    """A value in the form in which it is shared.

    Args:
        value: nested tuples, lists and dicts of tensors and plain values.
        write: shares a tensor.
        other: makes the plain value that stands for any other object.

    Raises:
        SharedValueError: it nests too deep.
    """
    tensors: list[Shape] = []

    def pack(one: Any, depth: int) -> Any:
        if isinstance(one, torch.Tensor):
            tensors.append(write(one))
            return [_TENSOR, len(tensors) - 1]
        if one is None or type(one) in (bool, int, float, str):
            if type(one) is int and not -(2**63) <= one < 2**64:
                raise SharedValueError("an integer of more than 64 bits")
            return one
        if depth == _DEPTH:
            raise SharedValueError(f"a value nests deeper than {_DEPTH}")
        if isinstance(one, tuple):
            return [_TUPLE, *[pack(item, depth + 1) for item in one]]
        if isinstance(one, list):
            return [_LIST, *[pack(item, depth + 1) for item in one]]
        if isinstance(one, dict):
            return [_DICT, *[[pack(key, depth + 1), pack(item, depth + 1)] for key, item in one.items()]]
        return [_OTHER, other(one)]

    return Shared(pack(value, 0), tensors)


def tensors_alone(shared: Shared) -> str:
    """What a value has besides tensors.

    Returns:
        `"tensor"` if it is a tensor, `"tuple"` if it is a tuple of tensors in their order, `"parts"` if objects that
        cannot be shared are among these, and else `""`.
    """
    skeleton = shared.skeleton
    if skeleton == [_TENSOR, 0]:
        return "tensor"
    if not isinstance(skeleton, list) or skeleton[0] != _TUPLE:
        return ""
    items = [item for item in skeleton[1:] if not isinstance(item, list) or item[0] != _OTHER]
    if items != [[_TENSOR, at] for at in range(len(shared.tensors))]:
        return ""
    return "tuple" if len(items) == len(skeleton) - 1 else "parts"


def unpack_value(shared: Shared, read: Callable[[int, Shape], torch.Tensor], other: Callable[[Any], Any]) -> Any:
    """The value that was shared.

    Args:
        shared: as `pack_value` made it, or as another process claims to have made it.
        read: takes a tensor by its index and its place.
        other: makes the object that a plain value stands for.

    Raises:
        SharedValueError: `shared` is no value, or names a tensor twice: then few bytes could become many tensors.
    """
    unread = set(range(len(shared.tensors)))

    def unpack(node: Any, depth: int) -> Any:
        if not isinstance(node, list):
            return node
        if depth > _DEPTH or not node:
            raise SharedValueError("a value nests too deep, or is of no kind")
        kind, rest = node[0], node[1:]
        if kind == _TENSOR and len(rest) == 1 and type(rest[0]) is int and rest[0] in unread:
            unread.remove(rest[0])
            return read(rest[0], shared.tensors[rest[0]])
        if kind == _TUPLE:
            return tuple([unpack(item, depth + 1) for item in rest])
        if kind == _LIST:
            return [unpack(item, depth + 1) for item in rest]
        if kind == _DICT and all(isinstance(pair, list) and len(pair) == 2 for pair in rest):
            return {unpack(key, depth + 1): unpack(item, depth + 1) for key, item in rest}
        if kind == _OTHER and len(rest) == 1:
            return other(rest[0])
        raise SharedValueError("a value is of no kind")

    return unpack(shared.skeleton, 0)
