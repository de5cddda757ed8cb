"""A subscription to a trace that any client submitted. Like a trace, it owns no task and reads nothing ahead."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import anyio

from tracewire.error_mapping import bus_errors
from tracewire.errors import UnknownTrace

from .event_reader import EventReader
from .output import Event, Final, only
from .readers import Reader

if TYPE_CHECKING:
    from .session import Session

__all__ = ["Subscription"]

logger = logging.getLogger("tracewire")


class Subscription(Reader):
    """A trace's events, in order, each once: first what is there, then what comes, up to and with the final.

    In place of events that were trimmed comes a `Gap` with the state after them.

    An async iterator, and an async context manager for those who leave before the end. Reading begins with `start()`,
    with entering, or with the first item; `since="now"` means that moment.
    """

    def __init__(self, session: Session, trace_id: str, reader: EventReader, names: Iterable[str] | None) -> None:
        if names is not None:
            if isinstance(names, str) or not isinstance(names, Iterable):
                raise TypeError(f"names is a collection of saved names, as in {{'projection'}}, not {names!r}")
            names = frozenset(names)
            for name in names:
                if not isinstance(name, str):
                    raise TypeError(f"names is a collection of saved names, and {name!r} is none")
        self.trace_id = trace_id
        self._session = session
        self._reader = reader
        self._names = names
        self._started = False
        self._ended = False

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
        bus = self._session.open_bus()
        with bus_errors():
            known, left = await bus.records.left(self.trace_id)
            if not known and not await bus.exists(self.trace_id):
                raise UnknownTrace(self.trace_id)
        if left is not None:
            self._session.presence.watch_deadline(self.trace_id, max(0.0, left))
        await self._reader.start()
        self._started = True

    async def aclose(self) -> None:
        """Stop reading. Idempotent, and finishes even when cancelled."""
        self._ended = True
        with anyio.CancelScope(shield=True):
            await self._reader.aclose()

    async def __anext__(self) -> Event:
        if self._ended:
            raise StopAsyncIteration
        if not self._started:
            await self.start()
        event = await self._reader.next()
        if event is None:
            self._ended = True
            raise StopAsyncIteration
        if self._names is None:
            return event
        if isinstance(event, Final):
            self._missed(event, self._names)
        return only(event, self._names)

    def _missed(self, final: Final, names: frozenset[str]) -> None:
        """Say which of the names the trace has never saved anything as."""
        if final.status not in ("finished", "stopped"):
            return
        saved = {entry.name for entry in final.manifest} | {where.split(".", 2)[-1] for where in final.save_errors}
        for name in sorted(names - saved):
            near = difflib.get_close_matches(name, sorted(saved), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            logger.warning(
                "a subscription to trace %s asked for the save %r, which the trace never had (it has %s)%s",
                *(self.trace_id, name, ", ".join(sorted(saved)) or "none", hint),
            )

    def __repr__(self) -> str:
        return f"<Subscription to {self.trace_id} at {self.position}>"
