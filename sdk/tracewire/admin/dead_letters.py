"""The dead-letter queue: lists the submissions that no engine could run, and submits one again."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from tracewire.checks import check_count, check_text, is_entry_id, shown
from tracewire.error_mapping import bus_errors, refusals
from tracewire.errors import TraceRejected, UnknownDeadLetter
from tracewire.traces.model import Model, model_name
from tracewire.traces.sending import Sending
from tracewire.traces.whole_submission import whole_submission
from tracewire_bus.wire.codec import NewerSchema, check_schema, decode_submission
from tracewire_bus.wire.messages import REQUEST_SCHEMA, Submission
from tracewire_bus.wire.signing import unwrap

from .listing import Listing

if TYPE_CHECKING:
    from tracewire.traces.session import Session
    from tracewire_bus.bus import Bus
    from tracewire_bus.store.dead_letters import DeadLetter as Letter

__all__ = ["DeadLetter", "DeadLetters"]

#: How many dead letters are read at a time.
_PAGE = 100


class DeadLetter(msgspec.Struct, frozen=True):
    """A submission in the dead-letter queue.

    Attributes:
        id: the dead letter's id.
        time: when the bus moved the submission here, in seconds since the epoch by Redis's clock.
        model: the model that it was submitted to.
        trace_id: the id of its trace, which has ended.
        reason: why the bus moved the submission here.
        submission: the decoded submission, or None if it cannot be read.
        problem: why it cannot be read, or None.
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
            check_schema(letter.schema, REQUEST_SCHEMA)
            submission = decode_submission(unwrap(letter.data)[1])
        except (NewerSchema, ValueError) as error:
            problem = str(error)
        return cls(letter.id, letter.time, letter.model, letter.trace, letter.reason, submission, problem)


async def _resubmission_of(letter: DeadLetter, bus: Bus, client: str) -> Submission:
    """The submission by which a client submits a dead letter again. Its trace id is new, and the same at each call.

    Raises:
        TraceRejected: the submission cannot be read.
        ValueMissing: a large variable of it, or an array of its interventions, has expired.
    """
    if letter.submission is None:
        raise TraceRejected("submission", f"dead letter {letter.id} cannot be read: {letter.problem}")
    submission = msgspec.structs.replace(
        letter.submission,
        trace=uuid.uuid5(uuid.NAMESPACE_URL, f"tracewire:dead:{bus.keys.prefix}:{letter.id}:{letter.trace_id}").hex,
        # The first submitter may have ended, and no longer renews a lease.
        detach=True,
        lease="",
        client=client,
    )
    return await whole_submission(submission, letter.trace_id, bus)


class DeadLetters:
    """The dead-letter queue: submissions that no engine could read, or whose engines were lost each time.

    Redis keeps about the latest 10000. Available as `Client.dead_letters`.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def list(
        self, *, model: Model | str | None = None, after: str = "", limit: int | None = None
    ) -> Listing[DeadLetter]:
        """The dead letters, the oldest first. `model` limits the list to one model, `after` to the dead letters after
        the one of this id, and `limit` to that number.

        Raises:
            TypeError: `model` is neither a model nor its name, or `after` is no text.
            ValueError: `after` is no dead letter's id, or `limit` is no positive integer.
        """
        if check_text("after", after) and not is_entry_id(after):
            raise ValueError(f"after: expected a dead letter's id, got {shown(after)}")
        wanted = None if model is None else model_name(model)
        most = None if limit is None else check_count("limit", limit)
        return Listing(lambda: self._pages(wanted, after, most))

    async def _pages(self, model: str | None, after: str, most: int | None) -> AsyncIterator[Sequence[DeadLetter]]:
        while most is None or most > 0:
            # With a model, read full pages: it is not known how many of the next letters are of other models.
            count = _PAGE if most is None or model is not None else min(_PAGE, most)
            with bus_errors():
                found = await self._session.open_bus().dead_letters.list(after, count)
            page = [DeadLetter.of(one) for one in found if model in (None, one.model)][:most]
            if page:
                yield page
            if len(found) < count:
                return
            after, most = found[-1].id, most if most is None else most - len(page)

    async def count(self) -> int:
        """The number of dead letters, of all models.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        with bus_errors():
            return await self._session.open_bus().dead_letters.count()

    async def get(self, id_: str, /) -> DeadLetter:
        """The dead letter of this id.

        Raises:
            UnknownDeadLetter: there is none of this id.
        """
        return DeadLetter.of(await self._found(id_))

    async def _found(self, id_: str) -> Letter:
        bus = self._session.open_bus()
        with bus_errors():
            found = await bus.dead_letters.find(id_) if is_entry_id(id_) else None
        if found is None:
            raise UnknownDeadLetter(id_)
        return found

    async def resubmit(self, letter: DeadLetter | str, /) -> str:
        """Submit a dead letter again, as a new trace, and return the new trace's id.

        The new trace belongs to this client and runs detached. Its deadline counts from now, and its large variables
        are sent again. The dead letter is removed. If the removal fails after the trace was queued, another call
        queues nothing more and returns the same id.

        Raises:
            UnknownDeadLetter: there is no such dead letter.
            TraceRejected: the submission cannot be read.
            ValueMissing: a large variable of it, or an array of its interventions, has expired.
            UnknownModel: no live engine serves the model.
            Overloaded: too many submissions wait for the model.
            BusFull: Redis has too little memory left.
            BusUnavailable: Redis does not answer.
        """
        id_ = _id_of(letter)
        found = DeadLetter.of(await self._found(id_))
        bus = self._session.open_bus()
        with bus_errors():
            submission = await _resubmission_of(found, bus, self._session.name)
            model = await self._session.models.find(submission.model)
            with refusals(submission.model, submission.trace):
                await Sending(bus, submission).send(model.info.queue_limit, model.info.retention_s or None)
            await bus.dead_letters.drop(id_)
        return submission.trace

    async def drop(self, letter: DeadLetter | str, /) -> bool:
        """Remove a dead letter. Returns whether it existed.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        id_ = _id_of(letter)
        bus = self._session.open_bus()
        with bus_errors():
            return is_entry_id(id_) and await bus.dead_letters.drop(id_)

    def __repr__(self) -> str:
        return "<DeadLetters>"


def _id_of(letter: DeadLetter | str) -> str:
    return letter.id if isinstance(letter, DeadLetter) else letter
