"""Large arrays in the client: loaded when a caller asks for one, and sent ahead of a submission that has some.

An array above a threshold does not travel in an event or in a submission but in a blob beside them, in chunks on a
connection of its own. An `ArrayRef` stands in its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tracewire.error_mapping import bus_errors
from tracewire.errors import ValueMissing
from tracewire_bus.store.blobs import THRESHOLD_BYTES, BlobMissing
from tracewire_bus.wire.arrays import array_of
from tracewire_bus.wire.digests import digest
from tracewire_bus.wire.kinds import is_array
from tracewire_bus.wire.messages import NO_MEDIA
from tracewire_bus.wire.packing import pack, unpack
from tracewire_bus.wire.refs import ArrayRef

if TYPE_CHECKING:
    import numpy as np

    from tracewire_bus.bus import Bus
    from tracewire_bus.wire.messages import Block, Submission

__all__ = ["LargeValues", "load", "offload_large_arrays"]


async def load(value: Any, *, exact: bool = False) -> Any:
    """`value`, such as `result.saves` or `output.delta`, with arrays that NumPy computes with as one expects.

        saves = await tracewire.load(result.saves)
        saves["acts"][0].mean()

    Every `ArrayRef` in it is downloaded, one after the other, and checked against its digest;
    whether an array came as a reference is the engine's choice, by its size. Arrays of bfloat16 and of the 8-bit floats
    become float32 arrays of the same values: NumPy sums those types in their own precision, and saves them without
    their dtype. With `exact`, arrays keep the dtype that the engine saved, by which digests are compared.

    Lists, tuples and dicts are new; `value` is left as it was. A tuple subclass becomes a tuple.

    Raises:
        ValueMissing: a reference's array has expired, or is not whole any more.
        BusRefused: Redis refuses.
        ClientClosed: the client that read the reference is closed.
    """
    if isinstance(value, ArrayRef):
        value = await value.load()
    elif isinstance(value, dict):
        return {key: await load(item, exact=exact) for key, item in value.items()}
    elif isinstance(value, list):
        return [await load(item, exact=exact) for item in value]
    elif isinstance(value, tuple):
        return tuple([await load(item, exact=exact) for item in value])
    if exact or not is_array(value):
        return value
    array = array_of(value)
    return array.astype("float32") if array.dtype.name.startswith(("bfloat16", "float8")) else value


class LargeValues:
    """Loads the arrays that one trace's events refer to."""

    def __init__(self, trace_id: str, bus: Bus) -> None:
        self.trace_id = trace_id
        self._bus = bus

    async def load(self, ref: ArrayRef) -> np.ndarray[Any, Any]:
        """The array, read-only and checked against the reference's digest.

        Raises:
            ValueMissing: it has expired, or is not whole any more.
            BusUnavailable: Redis stayed away.
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
