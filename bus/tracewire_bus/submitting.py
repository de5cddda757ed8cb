"""Submits a trace: makes its record and queues it, and leaves no record of what the queue refuses."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from tracewire_bus.domain.limits import check_size, check_submission
from tracewire_bus.store.keys import Keys
from tracewire_bus.store.memory import Memory
from tracewire_bus.store.proofs import Proofs
from tracewire_bus.store.submission_queue import Queue
from tracewire_bus.store.trace_records import Records, TraceElsewhere, TraceEnded
from tracewire_bus.transport.errors import BusError, BusUnavailable
from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.live_values import unpack_live
from tracewire_bus.wire.messages import Submission

__all__ = ["submit"]

logger = logging.getLogger("tracewire")


class SubmittingBus(Protocol):
    """The part of a bus that a submission uses."""

    keys: Keys
    proofs: Proofs

    @property
    def queue(self) -> Queue:
        """The queues."""

    @property
    def records(self) -> Records:
        """The records."""

    @property
    def memory(self) -> Memory:
        """The memory of Redis."""

    async def commands(self, *commands: tuple[Any, ...]) -> list[Any]:
        """The replies to commands of one round trip."""


async def submit(
    bus: SubmittingBus, submission: Submission, limit: int | None, retention_s: float | None, owner: str
) -> bool:
    """See `Bus.submit`."""
    check_submission(submission)
    data = encode(submission)
    check_size(len(data))
    model, trace = submission.model, submission.trace
    creation = bus.records.create_command(submission, unpack_live(submission.live), retention_s, owner)
    await bus.memory.check_reserve()
    signed = await bus.proofs.submission(model, trace, data)
    try:
        created, has_left = await bus.queue.put(
            *(model, trace, signed),
            client=submission.client,
            priority=submission.priority,
            lease="" if submission.detach else submission.lease,
            limit=limit,
            tries=submission.max_attempts,
            # The record comes first, so that clients can steer and cancel a queued trace.
            before=[creation],
        )
    except BusUnavailable:
        raise
    except BusError:
        await _forget_refused(bus, model, trace, creation)
        raise
    if isinstance(created, bytes):
        await bus.queue.withdraw(model, trace)
        raise TraceElsewhere(f"trace {trace} was submitted to model {created.decode('utf-8', 'replace')!r}")
    if created and has_left and await bus.records.forget(trace, model):
        # No engine has run the trace on the new record: the trace ended earlier, and its keys have expired.
        raise TraceEnded(f"trace {trace} has ended and expired; Redis remembers only its id")
    return bool(created) or await bus.records.owner(trace) == owner


async def _forget_refused(bus: SubmittingBus, model: str, trace: str, creation: tuple[Any, ...]) -> None:
    """Remove the record of a trace that the queue has refused."""
    try:
        await bus.records.forget(trace, model)
        (there,) = await bus.commands(("EXISTS", bus.keys.submitted(model, trace)))
        if there:
            # Another client queued the same trace meanwhile, on the record that was just removed.
            await bus.commands(creation)
    except BusError as error:
        logger.warning("the record of trace %s, which was refused, stays until it expires: %s", trace, error)
