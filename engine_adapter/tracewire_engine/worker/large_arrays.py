"""Large arrays among the saves: frozen at their step, and digested and sent when the model does not wait for it.

Encoding and digesting 100 MB takes a tenth of a second, in which every request would wait. The model's thread therefore
only *freezes* an array above the threshold: it copies the array on its own device. It does not even copy an array whose
block has ended and whose memory nobody shares. A background thread (`blob_sender.py`) brings the array to the host,
digests it and sends it in chunks. Until then a `LargeArray` stands in the deltas; `encode` turns it into the reference
that travels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch

from tracewire_bus.store.blobs import CHUNK_BYTES, THRESHOLD_BYTES, new_blob
from tracewire_bus.wire.arrays import array_of, raw_bytes
from tracewire_bus.wire.digests import array_hash, digest
from tracewire_bus.wire.kinds import MAX_DEPTH, Unsavable
from tracewire_bus.wire.packing import wire
from tracewire_bus.wire.refs import DTYPES, ArrayRef

from .host_copy import TORCH_DTYPES, HostCopy, encoded_late

__all__ = ["LargeArray", "LargeArrayBudget", "LargeTuple", "SaveSnapshot", "encode"]

#: Bytes of frozen arrays that a worker holds at most between their step and their departure.
MAX_RESERVED_BYTES = 8 * 1024**3


class LargeArrayBudget:
    """The budget of a worker for large arrays: those of more than `threshold` bytes (0: no array is large)."""

    def __init__(self, threshold: int = THRESHOLD_BYTES, limit: int = MAX_RESERVED_BYTES) -> None:
        self.threshold = threshold
        self.limit = limit
        self.reserved = 0
        #: Whether a tensor is the engine's own and changes from step to step.
        self.changes: Callable[[torch.Tensor], bool] = lambda tensor: False
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> None:
        """Count `nbytes` as held.

        Raises:
            Unsavable: that would be more than the limit.
        """
        with self._lock:
            if self.reserved + nbytes > self.limit:
                raise Unsavable(
                    (), f"{self.reserved} bytes of large arrays wait for the bus already, of at most {self.limit}"
                )
            self.reserved += nbytes

    def free(self, nbytes: int) -> None:
        """Count them no more."""
        with self._lock:
            self.reserved -= nbytes

    def is_large(self, value: Any) -> bool:
        """Whether `value` is an array that travels in a blob of its own."""
        if not self.threshold:
            return False
        if isinstance(value, torch.Tensor):
            # Packing refuses tensors that are not dense.
            return (
                value.layout is torch.strided
                and value.dtype in TORCH_DTYPES
                and not value.is_meta
                and not value.is_nested
                and value.nbytes > self.threshold
            )
        return type(value) is np.ndarray and value.nbytes > self.threshold and value.dtype.name in DTYPES


class LargeArray:
    """An array as it was at one moment. Made on the model's thread, everything else is for one other thread.

    `name` is the saved name that it was found under; `blob` the name of the blob that it becomes.
    """

    __slots__ = (
        "_arrived",
        "_budget",
        "_digest",
        "_frozen",
        "_reserved",
        "blob",
        "borrowed",
        "dtype",
        "name",
        "nbytes",
        "shape",
    )

    def __init__(self, value: Any, name: str, budget: LargeArrayBudget, *, still: bool = False) -> None:
        """Freeze `value`. With `still`, its block has ended: nothing changes it any more but who shares its memory.

        Raises:
            Unsavable: too much is held already.
        """
        self.name = name
        self.blob = new_blob()
        self.shape = tuple(value.shape)
        self.nbytes = int(value.nbytes)
        self._budget = budget
        self._reserved = 0
        self._digest: bytes | None = None
        self._arrived: Any = None
        self.dtype = TORCH_DTYPES[value.dtype] if isinstance(value, torch.Tensor) else value.dtype.name
        self._frozen: Any = value
        #: Whether it is the value itself, which nothing will change.
        self.borrowed = still and _is_unshared(value) and not budget.changes(value)
        if self.borrowed:
            return
        budget.reserve(self.nbytes)
        self._reserved = self.nbytes
        try:
            if isinstance(value, torch.Tensor):
                self._frozen = value.detach().clone(memory_format=torch.contiguous_format)
                if value.is_cuda:
                    self._arrived = torch.cuda.Event()
                    self._arrived.record()
            else:
                self._frozen = np.array(value)
        except BaseException:
            self.release()
            raise

    @property
    def digest(self) -> bytes:
        """The array's digest, once its chunks have been gone through."""
        if self._digest is None:
            raise RuntimeError("a large array was asked for its digest before it was taken")
        return self._digest

    def chunks(self) -> Iterator[memoryview]:
        """Its bytes in chunks, digested on the way. The views hold the memory for as long as they live."""
        raw = raw_bytes(array_of(self._host()))
        state = array_hash(self.dtype, self.shape)
        for start in range(0, len(raw), CHUNK_BYTES):
            chunk = raw[start : start + CHUNK_BYTES]
            state.update(chunk)
            yield chunk
        self._digest = state.digest()

    def _host(self) -> Any:
        if self._arrived is None:
            return self._frozen
        # Beside the model's own stream, which has made the copy by then.
        self._arrived.synchronize()
        with torch.cuda.stream(torch.cuda.Stream(self._frozen.device)):
            return self._frozen.cpu()

    def release(self) -> None:
        """Let go of the bytes; the digest stays."""
        self._frozen = None
        reserved, self._reserved = self._reserved, 0
        self._budget.free(reserved)

    def ref(self) -> ArrayRef:
        """The reference that travels in its place."""
        return ArrayRef(self.dtype, self.shape, self.digest, self.blob, self.name)


def _is_unshared(value: Any) -> bool:
    """Whether nobody else can change a tensor's memory: it lies on the host, and in no other tensor's storage."""
    if type(value) is not torch.Tensor or value.device.type != "cpu":
        return False
    count = getattr(torch._C, "_storage_Use_Count", None)
    # The tensor, and the storage object made to ask.
    return count is not None and count(value.untyped_storage()._cdata) <= 2


class LargeTuple:
    """A tuple that holds large arrays, as it was at one moment: a copy with a `LargeArray` in place of each."""

    __slots__ = ("arrays", "value")

    def __init__(self, value: tuple[Any, ...], arrays: list[LargeArray]) -> None:
        self.value = value
        self.arrays = arrays

    @property
    def digest(self) -> bytes:
        """The tuple's digest, once the chunks of all its arrays have been gone through."""
        return digest(_referring(self.value))


Frozen: TypeAlias = LargeArray | LargeTuple


def _referring(value: Any) -> Any:
    """`value` with a reference in place of each `LargeArray`."""
    if isinstance(value, LargeArray):
        return value.ref()
    if isinstance(value, tuple):
        return tuple([_referring(item) for item in value])
    if isinstance(value, list):
        return [_referring(item) for item in value]
    if isinstance(value, dict):
        return {key: _referring(item) for key, item in value.items()}
    return value


def _encoded(value: Any) -> Any:
    if isinstance(value, LargeArray | LargeTuple):
        return wire(_referring(value.value if isinstance(value, LargeTuple) else value))
    return encoded_late(value)


#: Encodes deltas whose large arrays have been digested.
encode = msgspec.msgpack.Encoder(enc_hook=_encoded).encode


class SaveSnapshot:
    """Saved values as they are at one moment, for one choice's tracker: small ones by a `HostCopy`, large ones frozen.

    Values are known by identity, so that one array saved under two names is frozen once.
    """

    __slots__ = ("_budget", "_frozen", "_still", "array", "local", "taken", "texts")

    def __init__(self, host: HostCopy, budget: LargeArrayBudget, *, still: bool = False) -> None:
        #: A small tensor that the host copy was primed with.
        self.array = host.array
        #: A value with every tensor in host memory.
        self.local = host
        self._budget = budget
        self._still = still
        self._frozen: dict[int, Frozen] = {}
        #: The large arrays frozen so far.
        self.taken: list[LargeArray] = []
        #: How many bytes the texts and bytes take that were found so far.
        self.texts = 0

    def frozen(self, value: Any) -> Frozen | None:
        """The earlier result of `freeze` for `value`."""
        return self._frozen.get(id(value))

    def freeze(self, value: Any, path: tuple[Any, ...]) -> Frozen | None:
        """`value` frozen, if it is a large array or a tuple that holds one; None for all else.

        Raises:
            Unsavable: it cannot travel.
        """
        known = self._frozen.get(id(value))
        if known is not None:
            return known
        made: Frozen | None = None
        if self._budget.is_large(value):
            made = self._array(value, path)
        elif isinstance(value, tuple) and self._budget.threshold and self._holds_large(value, 0):
            mark = len(self.taken)
            copy = self._copy(value, path)
            made = LargeTuple(copy, self.taken[mark:])
        if made is not None:
            self._frozen[id(value)] = made
        return made

    def _array(self, value: Any, path: tuple[Any, ...]) -> LargeArray:
        made = LargeArray(value, str(path[0]) if path else "", self._budget, still=self._still)
        self.taken.append(made)
        return made

    def _holds_large(self, value: Any, depth: int) -> bool:
        if isinstance(value, (tuple, list, dict)):
            if depth > MAX_DEPTH:
                return False
            items: Iterable[Any] = value.values() if isinstance(value, dict) else value
            return any(self._holds_large(item, depth + 1) for item in items)
        return self._budget.is_large(value)

    def _copy(self, value: Any, path: tuple[Any, ...]) -> Any:
        """A copy that shares nothing which can change, with large arrays frozen."""
        if len(path) > MAX_DEPTH:
            raise Unsavable(path[:3], f"containers nest deeper than {MAX_DEPTH} or refer to themselves")
        if isinstance(value, tuple):
            return tuple([self._copy(item, (*path, index)) for index, item in enumerate(value)])
        if isinstance(value, list):
            return [self._copy(item, (*path, index)) for index, item in enumerate(value)]
        if isinstance(value, dict):
            return {key: self._copy(item, (*path, key)) for key, item in value.items()}
        if self._budget.is_large(value):
            return self._array(value, path)
        if isinstance(value, set):
            value = set(value)
        local = self.local(value)
        # Refused here and now, under the name that it has.
        wire(local, path)
        return np.array(array_of(local)) if isinstance(local, (torch.Tensor, np.ndarray)) else local
