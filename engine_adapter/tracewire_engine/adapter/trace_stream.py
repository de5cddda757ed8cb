"""The stream of one attempt of a trace: numbers events, encodes them, and queues them for Redis in order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import anyio
import msgspec

from tracewire_bus.bus import Fenced, NotAllowed, Writer
from tracewire_bus.store.lifecycle import lifecycle_fields
from tracewire_bus.transport.backoff import Backoff
from tracewire_bus.wire.codec import encode, encode_output
from tracewire_bus.wire.messages import (
    Accepted,
    EngineInfo,
    Event,
    Final,
    Paused,
    RawOutput,
    RawSteered,
    Restarted,
    Resumed,
)

from .bulk_writer import TraceBulk
from .retention import Tally

__all__ = ["UNNUMBERED", "Acknowledgements", "RawAccepted", "RawFinal", "TraceStream"]

logger = logging.getLogger("tracewire")

#: How long to wait before a final that Redis does not allow is sent again, in seconds: at first, and at most.
_REFUSED_S, _REFUSED_MOST_S = 0.2, 5.0
#: The fields of an event that is not numbered yet. `TraceStream` numbers each event as it queues the event.
UNNUMBERED: dict[str, Any] = {"attempt": 0, "seq": 0}


class RawFinal(Final, tag="final"):
    """A `Final` whose deltas are already encoded."""

    deltas: list[tuple[int, int, msgspec.Raw]] = []  # type: ignore[assignment]  # noqa: RUF012


class RawAccepted(Accepted, tag="accepted"):
    """An `Accepted` whose live parameters are already encoded."""

    live: msgspec.Raw = msgspec.Raw(b"\x80")  # type: ignore[assignment]
    edits: list[list[tuple[str, int]]] = []  # noqa: RUF012
    prompt_token_ids: list[list[int]] = []  # noqa: RUF012
    prompt_token_strings: list[list[str]] = []  # noqa: RUF012


#: The events that lifecycle watchers get, and their names there.
_LIFECYCLE: dict[type[Event], str] = {
    RawAccepted: "accepted",
    Restarted: "restarted",
    Paused: "paused",
    Resumed: "resumed",
    Final: "final",
    RawFinal: "final",
}


class Acknowledgements:
    """Redis's acknowledgements of queued events for which no task has waited yet."""

    def __init__(self, others: Iterable[Acknowledgements] = ()) -> None:
        """Take over the acknowledgements of `others`."""
        self._outcomes: list[Coroutine[Any, Any, str]] = []
        for one in others:
            self._outcomes += one._outcomes
            one._outcomes = []

    def add(self, outcome: Coroutine[Any, Any, str]) -> None:
        """Take the outcome of a queued event."""
        self._outcomes.append(outcome)

    async def wait(self) -> None:
        """Wait for all of them.

        Raises:
            Fenced, BusFull: as `TraceStream.append`, of the earliest event that failed.
        """
        failure: Exception | None = None
        while self._outcomes:
            try:
                await self._outcomes.pop(0)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Drop those that are left: the attempt waits for no more of its events."""
        while self._outcomes:
            self._outcomes.pop().close()


class TraceStream:
    """Publishes the events of attempt `attempt` of `trace`, and counts them in `tally`, if there is one.

    Large saves of outputs go to `bulk` first, if there is one.
    """

    def __init__(
        self,
        writer: Writer,
        info: EngineInfo,
        trace: str,
        attempt: int,
        tally: Tally | None = None,
        bulk: TraceBulk | None = None,
    ) -> None:
        self._writer = writer
        self._info = info
        self._trace = trace
        self._attempt = attempt
        self._tally = tally
        self.bulk = bulk
        #: Is called with each event as it is queued, if it is set.
        self.observer: Callable[[Event], None] | None = None
        #: The number of the last event, -1 before the first.
        self.seq = -1
        #: Whether a final event is queued, or Redis has one.
        self.ended = False

    async def append(self, *events: Event, final: bool = False, behind: Iterable[Acknowledgements] = ()) -> None:
        """Publish events, the last of them the final one if `final`, behind others that are queued.

        Returns when Redis has all of them. After a failure the attempt has no final, and may publish another one.

        Raises:
            Fenced: another attempt's event, or a final from another process, is on the stream.
            BusFull: Redis has no memory for one of the events.
            EntryTooLarge: one of the events is too large. It has no number, and those before it are queued.
            BusError: Redis refuses one of the events.
        """
        acknowledgements = Acknowledgements(behind)
        try:
            await self.queue(*events, final=final, acknowledgements=acknowledgements)
            await acknowledgements.wait()
        except Fenced:
            raise
        except Exception:
            if final and self.ended:
                # Redis has answered each event up to the final.
                self.rewind()
            raise
        finally:
            acknowledgements.close()

    async def end(
        self, *events: Event, behind: Iterable[Acknowledgements] = (), again: Callable[[], None] = lambda: None
    ) -> None:
        """Publish events, the last of them the final one, as `append` does.

        While Redis does not allow this engine's user the final, waits and sends it again. Calls `again` before that.

        Raises:
            Fenced, BusFull, EntryTooLarge, BusError: as `append`.
        """
        backoff = Backoff(_REFUSED_S, _REFUSED_MOST_S)
        queued = self.seq
        while True:
            try:
                return await self.append(*events, final=True, behind=behind)
            except NotAllowed as error:
                if self.seq < queued:
                    # Redis lacks an event before these, which is not sent again.
                    raise
                pause = backoff.next()
                logger.log(backoff.level, "trace %s waits for a right to end: %s", self._trace, error)
            await anyio.sleep(pause)
            behind, events = (), tuple(one for one in events if one.seq > self.seq)
            again()

    async def queue(self, *events: Event, acknowledgements: Acknowledgements, final: bool = False) -> None:
        """Queue events as `append` does. Returns before Redis has them, when the store of bulk has their saves.

        The caller waits for `acknowledgements`, or closes them.
        """
        if self.bulk is not None:
            # The store must have the saves before an event that refers to them.
            for event in events:
                if type(event) is RawOutput and not isinstance(event.deltas, msgspec.Raw):
                    event.deltas = await self.bulk.take(event.deltas) or event.deltas
        # No await between numbering events and queueing them: ids must go up in the stream.
        for event in events[:-1]:
            acknowledgements.add(self._queue(event))
        acknowledgements.add(self._queue(events[-1], final=final))
        self.ended = self.ended or final

    def close(self) -> None:
        """Give the place of bulk back: the attempt publishes nothing more."""
        if self.bulk is not None:
            self.bulk.close()

    def rewind(self) -> None:
        """Number the next event after the last one that Redis has. Redis has refused later ones, and the final."""
        self.ended = False
        self.seq = self._writer.resume(self._trace, self._attempt)

    def hurry(self) -> None:
        """Stop waiting for Redis' memory: the events that wait for it fail with `BusFull`."""
        self._writer.hurry(self._trace)

    def _queue(self, event: Event, *, final: bool = False) -> Coroutine[Any, Any, str]:
        event.attempt, event.seq = self._attempt, self.seq + 1
        data = encode_output(event) if type(event) is RawOutput else encode(event)
        queued = self._writer.submit(
            self._trace,
            event.attempt,
            event.seq,
            data,
            final=final,
            # One transaction publishes the final and takes the trace off the queue.
            settles=(self._info.model, self._trace, self._info.engine, self._attempt) if final else None,
            live_version=event.version if isinstance(event, RawSteered) else None,
            lifecycle=self._lifecycle(event) if type(event) in _LIFECYCLE else None,
        )
        self.seq += 1
        if self.observer is not None:
            self.observer(event)
        if self._tally is not None:
            # The stream expires after its end, so retention would gain nothing from it.
            self._tally.over = self._tally.over or final
            self._tally.add(len(data))
        return queued

    def _lifecycle(self, event: Event) -> list[Any]:
        """The lifecycle entry of an event."""
        end = event if isinstance(event, Final) else None
        return lifecycle_fields(
            _LIFECYCLE[type(event)],
            self._trace,
            model=self._info.model,
            engine=self._info.engine,
            attempt=self._attempt,
            status=end.status if end else None,
            error=end.error.type if end and end.error else "",
            usage=end.usage if end else None,
        )
