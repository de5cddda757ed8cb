"""Large arrays in the client: loaded when a caller asks for one, and sent ahead of a submission that has some.

An array above a threshold does not travel in an event or in a submission but in a blob beside them, in chunks on a
connection of its own. An `ArrayRef` stands in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from tracewire.checks import shown
from tracewire.error_mapping import bus_errors
from tracewire.errors import ValueMissing
from tracewire_bus.store.blobs import THRESHOLD_BYTES, BlobMissing
from tracewire_bus.wire.arrays import array_of, extra_dtypes
from tracewire_bus.wire.digests import digest
from tracewire_bus.wire.kinds import is_array
from tracewire_bus.wire.messages import NO_MEDIA
from tracewire_bus.wire.packing import pack, unpack
from tracewire_bus.wire.refs import DTYPES, ArrayRef

if TYPE_CHECKING:
    import numpy as np

    from tracewire_bus.bus import Bus
    from tracewire_bus.wire.messages import Block, Submission

__all__ = ["LargeValues", "as_dtype", "fetched", "holds_references", "load", "offload_large_arrays"]


async def load(value: Any, *, dtype: str | None = None, exact: bool = False) -> Any:
    """Download the arrays in `value`, such as `result.saves` or `output.delta`, and make them computable in NumPy.

        saves = await tracewire.load(result.saves)
        saves["acts"][0].mean()

    The engine sends large arrays as references (`ArrayRef`). The client downloads them one after the other, and
    compares each with its digest. With a `dtype`, such as `"float32"`, all arrays get that dtype. Otherwise arrays of
    bfloat16 and of 8-bit floats become float32 arrays of the same values, since NumPy sums those types in their own
    precision and saves them without their dtype. With `exact`, arrays keep the saved dtype, which digests depend on.

    The returned lists, tuples and dicts are new, and `value` is not changed. A tuple subclass becomes a tuple.

    Raises:
        ValueMissing: a reference's array has expired, or parts of it are missing.
        ValueError: `dtype` names no dtype, or is given together with `exact`.
        BusRefused: Redis refuses.
        ClientClosed: the client that read the reference is closed.
    """
    convert = as_dtype(dtype, exact=exact)
    return convert(await fetched(value))


async def fetched(value: Any) -> Any:
    """A copy of `value` with new containers, and with downloaded, writable arrays in place of references."""
    if isinstance(value, ArrayRef):
        array = await value.load()
        # The memory was allocated for this call, so no other code can see a change.
        array.flags.writeable = True
        return array
    if isinstance(value, dict):
        return {key: await fetched(item) for key, item in value.items()}
    if isinstance(value, list):
        return [await fetched(item) for item in value]
    if isinstance(value, tuple):
        return tuple([await fetched(item) for item in value])
    return value


def holds_references(value: Any) -> bool:
    """Whether `value` has references, which `fetched` would download."""
    if isinstance(value, dict):
        return any(map(holds_references, value.values()))
    if isinstance(value, list | tuple):
        return any(map(holds_references, value))
    return isinstance(value, ArrayRef)


def as_dtype(dtype: str | None, *, exact: bool = False) -> Callable[[Any], Any]:
    """A function that converts the arrays in a value: see `load`.

    Raises:
        ValueError: `dtype` names no dtype, or is given together with `exact`.
    """
    import numpy as np

    if dtype is not None and (exact or dtype not in DTYPES):
        wanted = "expected either dtype or exact" if exact else f"expected one of {', '.join(sorted(DTYPES))}"
        raise ValueError(f"dtype: {wanted}, got {shown(dtype)}")
    target = None if dtype is None else extra_dtypes().get(dtype) or np.dtype(dtype)

    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: convert(item) for key, item in value.items()}
        if isinstance(value, list):
            return [convert(item) for item in value]
        if isinstance(value, tuple):
            return tuple(map(convert, value))
        if exact or not is_array(value) or isinstance(value, ArrayRef):
            return value
        array = array_of(value)
        if target is not None:
            return array.astype(target, copy=False)
        return array.astype("float32") if array.dtype.name.startswith(("bfloat16", "float8")) else value

    return convert


class LargeValues:
    """Loads the arrays to which one trace's events refer."""

    def __init__(self, trace_id: str, bus: Bus) -> None:
        self.trace_id = trace_id
        self._bus = bus

    async def load(self, ref: ArrayRef) -> np.ndarray[Any, Any]:
        """Download an array and compare it with the reference's digest. The array is read-only.

        Raises:
            ValueMissing: the array has expired, or parts of it are missing.
            BusUnavailable: Redis does not answer.
            ClientClosed: the client is closed.
        """
        with bus_errors():
            try:
                return await self._bus.blobs.load(self.trace_id, ref)
            except BlobMissing as error:
                raise ValueMissing(self.trace_id, ref.name, str(error)) from error


async def offload_large_arrays(submission: Submission, bus: Bus, stored: list[ArrayRef]) -> Submission:
    """A copy of `submission` with references in place of large arrays, which are written to blobs first.

    `stored` gains the reference to each blob when it is written. An array that several prompts use is sent once. The
    blobs of a trace that no engine accepts expire.
    """
    blocks = [submission.block, *(invoke.block for invoke in submission.invokes)]
    # Computing digests takes time, and a single block rarely has an array twice.
    sent: dict[bytes, ArrayRef] | None = {} if len([one for one in blocks if one is not None]) > 1 else None

    async def moved(block: Block | None) -> Block | None:
        if block is None or len(block.variables) <= THRESHOLD_BYTES:
            return block
        variables = await _referring(submission.trace, block.variables, bus, sent, stored)
        return msgspec.structs.replace(block, variables=variables)

    async def media(packed: bytes) -> bytes:
        if len(packed) <= THRESHOLD_BYTES:
            return packed
        return await _referring(submission.trace, packed, bus, sent, stored)

    invokes = [
        invoke
        if invoke.block is None and invoke.media == NO_MEDIA
        else msgspec.structs.replace(invoke, block=await moved(invoke.block), media=await media(invoke.media))
        for invoke in submission.invokes
    ]
    return msgspec.structs.replace(submission, block=await moved(submission.block), invokes=invokes)


async def _referring(
    trace_id: str, packed: bytes, bus: Bus, sent: dict[bytes, ArrayRef] | None, stored: list[ArrayRef]
) -> bytes:
    """A packed dict of values by name, with references in place of its large arrays.

    `sent` has the references of arrays that were sent before, by digest.
    """

    async def store(value: Any, name: str) -> ArrayRef:
        stored.append(await bus.blobs.store(trace_id, value, name))
        return stored[-1]

    async def moved(value: Any, name: str) -> Any:
        if isinstance(value, list | tuple):
            return type(value)([await moved(item, name) for item in value])
        if isinstance(value, dict):
            return {key: await moved(item, name) for key, item in value.items()}
        if getattr(value, "nbytes", 0) > THRESHOLD_BYTES and not isinstance(value, ArrayRef):
            if sent is None:
                return await store(value, name)
            key = digest(value)
            if key not in sent:
                sent[key] = await store(value, name)
            return sent[key]
        return value

    return pack({name: await moved(value, name) for name, value in unpack(packed).items()})
