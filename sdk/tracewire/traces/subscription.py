"""A subscription to a trace that any client submitted. Like a trace, it owns no task and reads nothing ahead."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING

import anyio

from tracewire.error_mapping import bus_errors
from tracewire.errors import SaveMissing, UnknownTrace
from tracewire_bus.domain.fold import Fold
from tracewire_bus.wire.ids import FINAL_ID
from tracewire_bus.wire.messages import Status

from .ending import Ending
from .event_reader import EventReader
from .event_stream import EventStream
from .output import Event, Final, only
from .state import Result

if TYPE_CHECKING:
    from .presence import Overdue
    from .session import Session

__all__ = ["Subscription"]

logger = logging.getLogger("tracewire")

#: A position that only the final comes after, in any trace.
_BEFORE_FINAL = f"{FINAL_ID.partition('-')[0]}-0"


class Subscription(EventStream[Event]):
    """A trace's events, in order, each once: first those that exist already, then new ones, up to and with the final.

    A `Gap` stands in place of trimmed events, with the state after them. An async iterator, and an async context
    manager for callers that leave before the end. Reading begins with `start()`, with entering, or with the first item;
    `since="now"` and `since="recent"` mean that moment.
    """

    def __init__(self, session: Session, trace_id: str, reader: EventReader, names: Iterable[str] | None) -> None:
        if names is not None:
            if isinstance(names, str) or not isinstance(names, Iterable):
                raise TypeError(f"names is a collection of saved names, as in {{'projection'}}, not {names!r}")
            names = frozenset(names)
            for name in names:
                if not isinstance(name, str):
                    raise TypeError(f"names is a collection of saved names, and {name!r} is none")
        self.trace_id = self._trace_id = trace_id
        self._session = session
        self._reader = reader
        self._names = names
        self._started = False
        self._ended = False
        #: The watch over the trace's deadline, while this may wait for its end.
        self._overdue: Overdue | None = None

    @property
    def position(self) -> str:
        """Id of the last event read: `subscribe(trace, since=subscription.position)` goes on after it."""
        return self._reader.position

    async def start(self) -> None:
        """Begin to read. A second call does nothing.

        Raises:
            UnknownTrace: no such trace was submitted, or it has expired.
        """
        if self._started:
            return
        await self._find()
        await self._reader.start()
        self._started = True

    async def check(self) -> None:
        """Begin to read, as `start` does, and check `names`. A service calls it before it answers with a stream.

        The check needs the trace's end: while the trace runs, no name is refused.

        Raises:
            UnknownTrace: no such trace was submitted, or it has expired.
            SaveMissing: the trace has ended well, and saved nothing under one of the names.
        """
        await self.start()
        final = await self._final() if self._names else None
        if final is not None and self._names is not None:
            missing = sorted(_missing(final, self._names))
            if missing:
                raise SaveMissing(self.trace_id, missing[0], _saved(final), "", True)

    async def result(self) -> Result:
        """Wait for the trace's end; return the output and the saves, compared with the engine's digests.

        With `names`, the result has these saves alone. The call reads the trace from its beginning, independently of an
        iteration over this subscription, and can be made at any time.

        Raises:
            UnknownTrace: no such trace was submitted, or it has expired.
            TraceRejected: the trace never ran; `field` says why.
            InterventionError: its block raised; `result` has the output and saves until then.
            TraceFailed: its engine could not go on, or it was cancelled or expired; `result` likewise.
            StateMismatch: the saves differ from those that the engine collected.
            ValueMissing: saves are in a bulk store that cannot be read.
        """
        await self._find()
        fold = Fold(self._names, verifying=True)
        async for _ in self._read_apart("start", fold):
            if fold.finished:
                break
        ending = Ending(self.trace_id, fold)
        ending.raise_failure()
        return ending.verified()

    async def until_done(self) -> Status:
        """Wait for the trace's end; return how it ended: `"finished"`, `"stopped"`, `"cancelled"`, `"expired"`,
        `"rejected"` or `"failed"`. The call reads independently of an iteration over this subscription.

        Raises:
            UnknownTrace: no such trace was submitted, or it has expired.
        """
        await self._find()
        while (final := await self._final()) is None:
            async for event in self._read_apart("now"):
                if isinstance(event, Final):
                    return event.status
        return final.status

    async def _find(self) -> None:
        bus = self._session.open_bus()
        with bus_errors():
            known, left = await bus.records.left(self.trace_id)
            if not known and not await bus.exists(self.trace_id):
                raise UnknownTrace(self.trace_id)
        if left is not None and self._overdue is None:
            self._overdue = self._session.presence.watch_deadline(self.trace_id, max(0.0, left))

    async def _final(self) -> Final | None:
        """The trace's final, if it has ended."""
        bus = self._session.open_bus()
        with bus_errors():
            if await bus.tail_id(self.trace_id) != FINAL_ID:
                return None
        async for event in self._read_apart(_BEFORE_FINAL):
            if isinstance(event, Final):
                return event
        return None

    async def _read_apart(self, since: str, fold: Fold | None = None) -> AsyncIterator[Event]:
        """The events, over a reader that closes with this iteration."""
        reader = EventReader(self.trace_id, self._session.open_bus(), since)
        try:
            await reader.start()
            while (event := await reader.next(fold)) is not None:
                yield event
        finally:
            with anyio.CancelScope(shield=True):
                await reader.aclose()

    async def aclose(self) -> None:
        """Stop reading. Idempotent, and finishes even when cancelled."""
        self._ended, self._overdue = True, None
        with anyio.CancelScope(shield=True):
            await self._reader.aclose()

    @property
    def _ready(self) -> bool:
        """Whether the next event is here."""
        return self._reader.ready

    async def __anext__(self) -> Event:
        if self._ended:
            raise StopAsyncIteration
        if not self._started:
            await self.start()
        event = await self._reader.next()
        if event is None:
            self._ended, self._overdue = True, None
            raise StopAsyncIteration
        if self._names is None:
            return event
        if isinstance(event, Final):
            self._missed(event, self._names)
        return only(event, self._names)

    def _missed(self, final: Final, names: frozenset[str]) -> None:
        """Log a warning for each name that the trace never saved."""
        saved = _saved(final)
        for name in sorted(_missing(final, names)):
            from difflib import get_close_matches

            near = get_close_matches(name, saved, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            logger.warning(
                "a subscription to trace %s asked for the save %r, which the trace never had (it has %s)%s",
                *(self.trace_id, name, ", ".join(saved) or "none", hint),
            )

    def __repr__(self) -> str:
        return f"<Subscription to {self.trace_id} at {self.position}>"


def _saved(final: Final) -> list[str]:
    """The names that a trace saved, or could not send."""
    return sorted({entry.name for entry in final.manifest} | {where.split(".", 2)[-1] for where in final.save_errors})


def _missing(final: Final, names: frozenset[str]) -> Iterable[str]:
    """The names among these that a trace never saved, if it has ended well."""
    return names.difference(_saved(final)) if final.status in ("finished", "stopped") else ()
