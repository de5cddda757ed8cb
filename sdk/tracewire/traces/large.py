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
    """`value`, such as `result.saves` or `output.delta`, with arrays that NumPy computes with as one expects.

        saves = await tracewire.load(result.saves)
        saves["acts"][0].mean()

    Every `ArrayRef` in it is downloaded, one after the other, and checked against its digest; whether an array came as
    a reference is the engine's choice, by its size. With a `dtype`, such as `"float32"`, all arrays are of that dtype.
    Otherwise arrays of bfloat16 and of the 8-bit floats become float32 arrays of the same values: NumPy sums those
    types in their own precision, and saves them without their dtype. With `exact`, arrays keep the dtype that the
    engine saved, by which digests are compared.

    Lists, tuples and dicts are new; `value` is left as it was. A tuple subclass becomes a tuple.

    Raises:
        ValueMissing: a reference's array has expired, or parts of it are missing.
        ValueError: `dtype` names no dtype, or is given together with `exact`.
        BusRefused: Redis refuses.
        ClientClosed: the client that read the reference is closed.
    """
    convert = as_dtype(dtype, exact=exact)
    return convert(await fetched(value))


async def fetched(value: Any) -> Any:
    """`value` with new containers, and with the arrays that it refers to, which are the caller's to change."""
    if isinstance(value, ArrayRef):
        array = await value.load()
        # No other code has this array: its memory was made for this call.
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
    """Whether `fetched` would download anything."""
    if isinstance(value, dict):
        return any(map(holds_references, value.values()))
    if isinstance(value, list | tuple):
        return any(map(holds_references, value))
    return isinstance(value, ArrayRef)


def as_dtype(dtype: str | None, *, exact: bool = False) -> Callable[[Any], Any]:
    """A function that makes arrays of a value arrays of `dtype`, or, without one, such as NumPy computes with.

    Raises:
        ValueError: no array can be of this dtype, or it is asked for beside `exact`.
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
    """Loads the arrays that one trace's events refer to."""

    def __init__(self, trace_id: str, bus: Bus) -> None:
        self.trace_id = trace_id
        self._bus = bus

    async def load(self, ref: ArrayRef) -> np.ndarray[Any, Any]:
        """The array, read-only and checked against the reference's digest.

        Raises:
            ValueMissing: it has expired, or is not whole any more.
            BusUnavailable: Redis does not answer.
            ClientClosed: the client is closed.
        """
        with bus_errors():
            try:
                return await self._bus.blobs.load(self.trace_id, ref)
            except BlobMissing as error:
                raise ValueMissing(self.trace_id, ref.name, str(error)) from error


async def offload_large_arrays(submission: Submission, bus: Bus) -> Submission:
    """`submission` with the large arrays among its variables in blobs, and referred to.

    What several of its prompts use is sent once. Blobs of a trace that no engine accepts expire by themselves.
    """
    blocks = [submission.block, *(invoke.block for invoke in submission.invokes)]
    # Taking a digest takes time, and one block alone hardly has an array twice.
    sent: dict[bytes, ArrayRef] | None = {} if len([one for one in blocks if one is not None]) > 1 else None

    async def moved(block: Block | None) -> Block | None:
        if block is None or len(block.variables) <= THRESHOLD_BYTES:
            return block
        variables = await _referring(submission.trace, block.variables, bus, sent)
        return msgspec.structs.replace(block, variables=variables)

    async def media(packed: bytes) -> bytes:
        return packed if len(packed) <= THRESHOLD_BYTES else await _referring(submission.trace, packed, bus, sent)

    invokes = [
        invoke
        if invoke.block is None and invoke.media == NO_MEDIA
        else msgspec.structs.replace(invoke, block=await moved(invoke.block), media=await media(invoke.media))
        for invoke in submission.invokes
    ]
    return msgspec.structs.replace(submission, block=await moved(submission.block), invokes=invokes)


async def _referring(trace_id: str, packed: bytes, bus: Bus, sent: dict[bytes, ArrayRef] | None) -> bytes:
    """A packed dict of values by name, with references for its large arrays.

    `sent` has those that were sent before, by digest.
    """

    async def moved(value: Any, name: str) -> Any:
        if isinstance(value, list | tuple):
            return type(value)([await moved(item, name) for item in value])
        if isinstance(value, dict):
            return {key: await moved(item, name) for key, item in value.items()}
        if getattr(value, "nbytes", 0) > THRESHOLD_BYTES and not isinstance(value, ArrayRef):
            if sent is None:
                return await bus.blobs.store(trace_id, value, name)
            key = digest(value)
            if key not in sent:
                sent[key] = await bus.blobs.store(trace_id, value, name)
            return sent[key]
        return value

    return pack({name: await moved(value, name) for name, value in unpack(packed).items()})
