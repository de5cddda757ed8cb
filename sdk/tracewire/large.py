"""Large arrays at the client's end: loaded when somebody wants one, and sent ahead of a submission that has some.

An array above a threshold does not travel in an event or in a submission but in a blob beside them, in chunks on a
connection of its own. What stands in its place is an [`ArrayRef`][tracewire.ArrayRef].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tracewire_bus.blobs import THRESHOLD_BYTES, BlobMissing
from tracewire_bus.messages import NO_MEDIA
from tracewire_bus.values import ArrayRef, pack, unpack

from .errors import ValueMissing, bus_errors

if TYPE_CHECKING:
    import numpy as np

    from tracewire_bus.messages import Block, Submission
    from tracewire_bus.streams import Bus

__all__ = ["LargeValues", "without_large"]


class LargeValues:
    """Loads what one trace's events refer to."""

    def __init__(self, trace: str, bus: Bus) -> None:
        self.trace = trace
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
                return await self._bus.blobs.load(self.trace, ref)
            except BlobMissing as error:
                raise ValueMissing(self.trace, ref.name, str(error)) from error


async def without_large(submission: Submission, bus: Bus) -> Submission:
    """`submission` with the large arrays among its variables in blobs, and referred to.

    Blobs of a trace that no engine accepts expire by themselves.
    """

    async def moved(block: Block | None) -> Block | None:
        if block is None or len(block.variables) <= THRESHOLD_BYTES:
            return block
        variables = await _referring(submission.trace, block.variables, bus)
        return msgspec.structs.replace(block, variables=variables)

    async def media(packed: bytes) -> bytes:
        return packed if len(packed) <= THRESHOLD_BYTES else await _referring(submission.trace, packed, bus)

    invokes = [
        invoke
        if invoke.block is None and invoke.media == NO_MEDIA
        else msgspec.structs.replace(invoke, block=await moved(invoke.block), media=await media(invoke.media))
        for invoke in submission.invokes
    ]
    return msgspec.structs.replace(submission, block=await moved(submission.block), invokes=invokes)


async def _referring(trace: str, packed: bytes, bus: Bus) -> bytes:
    """A packed dict of values by name, with references for its large arrays."""

    async def moved(value: Any, name: str) -> Any:
        if isinstance(value, list | tuple):
            return type(value)([await moved(item, name) for item in value])
        if isinstance(value, dict):
            return {key: await moved(item, name) for key, item in value.items()}
        if getattr(value, "nbytes", 0) > THRESHOLD_BYTES and not isinstance(value, ArrayRef):
            return await bus.blobs.store(trace, value, name)
        return value

    return pack({name: await moved(value, name) for name, value in unpack(packed).items()})
