"""A submission with all its arrays, as it can be submitted again: references were replaced when it was first sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tracewire.errors import ValueMissing
from tracewire_bus.domain.intervention_checks import array_fields, normalize
from tracewire_bus.store.blobs import BlobMissing
from tracewire_bus.store.vectors import VectorMissing
from tracewire_bus.wire.packing import pack, unpack
from tracewire_bus.wire.refs import ArrayRef

if TYPE_CHECKING:
    from tracewire_bus.bus import Bus
    from tracewire_bus.wire.messages import Block, Declared, Submission

__all__ = ["whole_submission"]


async def whole_submission(submission: Submission, trace_id: str, bus: Bus) -> Submission:
    """A copy with arrays in place of references to the blobs of the trace `trace_id`, and to vectors.

    Raises:
        ValueMissing: an array has expired.
    """

    async def loaded(block: Block | None) -> Block | None:
        if block is None:
            return None
        return msgspec.structs.replace(block, variables=await _loaded(trace_id, block.variables, bus))

    invokes = [
        msgspec.structs.replace(
            invoke, block=await loaded(invoke.block), media=await _loaded(trace_id, invoke.media, bus)
        )
        for invoke in submission.invokes
    ]
    return msgspec.structs.replace(
        submission,
        block=await loaded(submission.block),
        invokes=invokes,
        interventions=await _with_arrays(trace_id, submission.interventions, bus),
    )


async def _with_arrays(trace_id: str, interventions: Sequence[Declared], bus: Bus) -> list[Declared]:
    """Encoded interventions with arrays in place of references to vectors."""
    found = list(interventions)
    for index, name, value in array_fields(interventions):
        if isinstance(value, ArrayRef):
            try:
                array = await bus.vectors.fetch(value)
            except VectorMissing as error:
                raise ValueMissing(trace_id, f"interventions[{index}].{name}", str(error)) from error
            found[index] = msgspec.structs.replace(found[index], **{name: array})
    return normalize(found)


async def _loaded(trace_id: str, packed: bytes, bus: Bus) -> bytes:
    """A packed dict of values by name, with each reference replaced by its array."""

    async def loaded(value: Any, name: str) -> Any:
        if isinstance(value, list | tuple):
            return type(value)([await loaded(item, name) for item in value])
        if isinstance(value, dict):
            return {key: await loaded(item, name) for key, item in value.items()}
        if isinstance(value, ArrayRef):
            try:
                return await bus.blobs.load(trace_id, value)
            except BlobMissing as error:
                raise ValueMissing(trace_id, name, str(error)) from error
        return value

    return pack({name: await loaded(value, name) for name, value in unpack(packed).items()})
