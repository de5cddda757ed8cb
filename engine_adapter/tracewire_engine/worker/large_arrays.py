"""Large arrays among the saves: frozen in their step, then digested and sent on another thread.

Encoding and digesting 100 MB takes a tenth of a second, in which every request would wait. The model's thread therefore
only *freezes* an array above the threshold: it copies the array on its own device. It does not even copy an array of
unshared memory whose block has ended. A background thread (`blob_sender.py`) brings the array to the host, digests it
and sends it in chunks. Until then the deltas have a `LargeArray`, which `encode` turns into the reference that travels.
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
from tracewire_engine.link.cuda_events import recorded

from .host_copy import TORCH_DTYPES, HostCopy, encoded_late

__all__ = ["LargeArray", "LargeArrayBudget", "LargeTuple", "SaveSnapshot", "encode"]

#: The most bytes of frozen arrays that a worker holds between their step and their sending.
MAX_RESERVED_BYTES = 8 * 1024**3


class LargeArrayBudget:
    """Counts the bytes of large arrays that a worker holds.

    An array of more than `threshold` bytes is large (0: none is). At most `limit` bytes are held at once.
    """

    def __init__(self, threshold: int = THRESHOLD_BYTES, limit: int = MAX_RESERVED_BYTES) -> None:
        self.threshold = threshold
        self.limit = limit
        self.reserved = 0
        #: How many more bytes may be frozen to be sent, if the process to which they are sent limits them.
        self.room: int | None = None
        #: Whether a tensor is the engine's own and changes from step to step.
        self.changes: Callable[[torch.Tensor], bool] = lambda tensor: False
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> None:
        """Count `nbytes` as held.

        Raises:
            Unsavable: the worker would hold more than the limit.
        """
        with self._lock:
            if self.reserved + nbytes > self.limit:
                raise Unsavable(
                    (), f"{self.reserved} bytes of large arrays wait for the bus already; at most {self.limit} may"
                )
            self.reserved += nbytes

    def promise(self, nbytes: int) -> None:
        """Count `nbytes` as bytes that will be sent.

        Raises:
            Unsavable: so many may not be sent now.
        """
        if self.room is not None:
            if nbytes > self.room:
                room = max(0, self.room)
                raise Unsavable((), f"earlier large arrays wait for the bus; at most {room} bytes more may")
            self.room -= nbytes

    def free(self, nbytes: int) -> None:
        """Stop counting `nbytes` as held."""
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
    """A copy of an array as it was at one moment.

    The model's thread makes it; one other thread does everything else with it. `name` is the name of the save that
    holds the array, and `blob` the name of the blob that the array is sent as.
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

    def __init__(
        self, value: Any, name: str, budget: LargeArrayBudget, *, still: bool = False, sent: bool = True
    ) -> None:
        """Freeze `value`.

        Args:
            value: a tensor or an array.
            name: of the save.
            budget: counts the copy.
            still: whether the block has ended. An array whose memory nothing shares is then not copied.
            sent: whether it will be sent, and not only compared with what was.

        Raises:
            Unsavable: the worker holds too many bytes already.
        """
        if sent:
            budget.promise(int(value.nbytes))
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
        #: Whether this holds the value itself, without a copy, because nothing can change it.
        self.borrowed = still and _is_unshared(value) and not budget.changes(value)
        if self.borrowed:
            return
        budget.reserve(self.nbytes)
        self._reserved = self.nbytes
        try:
            if isinstance(value, torch.Tensor):
                self._frozen = value.detach().clone(memory_format=torch.contiguous_format)
                if value.is_cuda:
                    self._arrived = recorded([], value.device)
            else:
                self._frozen = np.array(value)
        except BaseException:
            self.release()
            raise

    @property
    def digest(self) -> bytes:
        """The array's digest, once its chunks have been gone through."""
        if self._digest is None:
            raise RuntimeError("the digest of a large array was read before its chunks were gone through")
        return self._digest

    def chunks(self) -> Iterator[memoryview]:
        """The array's bytes in chunks of `CHUNK_BYTES`. Going through them all computes the digest.

        Each view keeps the array's memory alive.
        """
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
        # On a stream of its own, once the model's stream has made the copy, so that the model is not held up.
        self._arrived.synchronize()
        with torch.cuda.stream(torch.cuda.Stream(self._frozen.device)):
            return self._frozen.cpu()

    def release(self) -> None:
        """Free the bytes. The digest stays."""
        self._frozen = None
        reserved, self._reserved = self._reserved, 0
        self._budget.free(reserved)

    def ref(self) -> ArrayRef:
        """The reference that travels in the array's place."""
        return ArrayRef(self.dtype, self.shape, self.digest, self.blob, self.name)


def _is_unshared(value: Any) -> bool:
    """Whether a tensor lies on the host and shares its memory with no other tensor."""
    if type(value) is not torch.Tensor or value.device.type != "cpu":
        return False
    count = getattr(torch._C, "_storage_Use_Count", None)
    # Two uses: the tensor's own, and that of the storage object made for this call.
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
    """Saved values at one moment, for one choice's tracker: small arrays are in a `HostCopy`, large ones are frozen.

    Arrays are found by identity, so one that is saved under two names is frozen once.
    """

    __slots__ = ("_budget", "_frozen", "_sent", "_still", "array", "items", "local", "taken", "texts")

    def __init__(self, host: HostCopy, budget: LargeArrayBudget, *, still: bool = False, sent: bool = True) -> None:
        #: Returns the host copy of a small tensor that was given to `HostCopy.prime`, or `None`.
        self.array = host.array
        #: Returns a value with every tensor in it copied to host memory.
        self.local = host
        self._budget = budget
        self._still, self._sent = still, sent
        self._frozen: dict[int, Frozen] = {}
        #: The large arrays frozen so far.
        self.taken: list[LargeArray] = []
        #: How many bytes the saved texts and byte strings found so far take.
        self.texts = 0
        #: How many items the saved containers have gained.
        self.items = 0

    def frozen(self, value: Any) -> Frozen | None:
        """The earlier result of `freeze` for `value`."""
        return self._frozen.get(id(value))

    def freeze(self, value: Any, path: tuple[Any, ...]) -> Frozen | None:
        """Freeze `value` if it is a large array or a tuple that holds one; returns `None` for any other value.

        Args:
            value: a saved value, or an item of one.
            path: where it is: the save's name, then the keys of items.

        Raises:
            Unsavable: the value cannot travel, or the worker holds too many bytes already.
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

    def promise(self, frozen: Frozen) -> None:
        """Note that what was frozen to be compared will be sent.

        Raises:
            Unsavable: so many bytes may not be sent now.
        """
        for array in [frozen] if isinstance(frozen, LargeArray) else frozen.arrays:
            self._budget.promise(array.nbytes)

    def _array(self, value: Any, path: tuple[Any, ...]) -> LargeArray:
        made = LargeArray(value, str(path[0]) if path else "", self._budget, still=self._still, sent=self._sent)
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
        """A deep copy of a tuple's item, with large arrays frozen."""
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
        # A value that cannot travel is refused here, where its name is known.
        wire(local, path)
        return np.array(array_of(local)) if isinstance(local, (torch.Tensor, np.ndarray)) else local
