"""The dead-letter queue: submissions that were given up, and how one is submitted again."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from tracewire.errors import TraceRejected, ValueMissing
from tracewire.traces.large import offload_large_arrays
from tracewire_bus.store.blobs import BlobMissing
from tracewire_bus.wire.codec import NewerSchema, check_schema, decode_submission
from tracewire_bus.wire.messages import Block, Submission
from tracewire_bus.wire.packing import pack, unpack
from tracewire_bus.wire.refs import ArrayRef

if TYPE_CHECKING:
    from tracewire_bus.bus import Bus
    from tracewire_bus.store.submission_queue import DeadLetter as Letter

__all__ = ["DeadLetter", "resubmission_of"]


@dataclass(frozen=True)
class DeadLetter:
    """A submission that was given up.

    Attributes:
        id: its name among the dead letters.
        time: when it was given up, in seconds since the epoch by Redis's clock.
        model: the model that it was submitted to.
        trace_id: the id of its trace, which has ended.
        reason: why it was given up.
        submission: what was submitted, if it can be read.
        problem: why it cannot, otherwise.
    """

    id: str
    time: float
    model: str
    trace_id: str
    reason: str
    submission: Submission | None
    problem: str | None = None

    @classmethod
    def of(cls, letter: Letter) -> DeadLetter:
        """A dead letter of the bus, decoded."""
        submission, problem = None, None
        try:
            check_schema(letter.schema)
            submission = decode_submission(letter.data)
        except (NewerSchema, msgspec.MsgspecError) as error:
            problem = str(error)
        return cls(letter.id, letter.time, letter.model, letter.trace, letter.reason, submission, problem)


async def resubmission_of(letter: DeadLetter, bus: Bus, client: str) -> Submission:
    """The submission by which a client submits a dead letter again. Its trace id is new, and the same at each call.

    Raises:
        TraceRejected: it cannot be read.
        ValueMissing: a large variable of it has expired.
    """
    if letter.submission is None:
        raise TraceRejected("submission", f"dead letter {letter.id} cannot be read: {letter.problem}")
    submission = msgspec.structs.replace(
        letter.submission,
        trace=uuid.uuid5(uuid.NAMESPACE_URL, f"tracewire:dead:{bus.keys.prefix}:{letter.id}:{letter.trace_id}").hex,
        # Its first submitter is gone, and no longer renews a lease.
        detach=True,
        lease="",
        client=client,
    )

    async def loaded(block: Block | None) -> Block | None:
        if block is None:
            return None
        return msgspec.structs.replace(block, variables=await _loaded(letter.trace_id, block.variables, bus))

    invokes = [
        msgspec.structs.replace(
            invoke, block=await loaded(invoke.block), media=await _loaded(letter.trace_id, invoke.media, bus)
        )
        for invoke in submission.invokes
    ]
    submission = msgspec.structs.replace(submission, block=await loaded(submission.block), invokes=invokes)
    return await offload_large_arrays(submission, bus)


async def _loaded(trace_id: str, packed: bytes, bus: Bus) -> bytes:
    """A packed dict of values by name, with the arrays that it refers to."""

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
