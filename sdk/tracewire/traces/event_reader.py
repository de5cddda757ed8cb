"""`EventReader`: the one place where entries of a trace's stream become events.

An entry that cannot be decoded, or is of a newer schema, is an error there. The reader skips additions of a newer
version of the same schema.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio
import msgspec

from tracewire.error_mapping import bus_errors, connect_error
from tracewire.errors import ClientTooOld, EventsLost, MalformedEvent, TraceForgotten, UnverifiedFinal, ValueMissing
from tracewire_bus.bulk.reader import BulkMissing
from tracewire_bus.bus import BusError, BusUnavailable, StreamGone
from tracewire_bus.bus import EventsLost as EntriesLost
from tracewire_bus.bus import Gap as EntryGap
from tracewire_bus.store.vectors import MISSING
from tracewire_bus.transport.backoff import Backoff, outages
from tracewire_bus.wire.bulk_ranges import BulkRange, bulk_range
from tracewire_bus.wire.codec import NewerSchema, UnknownKind, check_schema, decode_event
from tracewire_bus.wire.messages import Final

from .large import LargeValues
from .output import AnyEvent, Event, Gap, Output, Saving, Shared

if TYPE_CHECKING:
    from tracewire_bus.bus import Bus, Entry
    from tracewire_bus.domain.fold import Fold

__all__ = ["EventReader"]

logger = logging.getLogger("tracewire")


class EventReader:
    """Events of one trace, in order, from the entries of its stream. Owns no task and no scope."""

    def __init__(self, trace_id: str, bus: Bus, since: str, *, saves: bool = True) -> None:
        """`saves` is whether the caller reads the saves of events, so that the reader fetches those in bulk stores."""
        self.trace_id = trace_id
        self._bulk = bus.bulk
        self._vectors = bus.vectors
        self._is_genuine = bus.proofs.is_genuine
        self._saves = saves
        #: An entry that was read and not returned yet: the call that read it was cancelled.
        self._unreturned: Entry | None = None
        self._entries = bus.read(trace_id, since)
        self._large = LargeValues(trace_id, bus)
        self._closed = False
        #: The entry of the last event that `next` returned, as it is on the stream; None before, and for a gap.
        self.entry: Entry | None = None
        #: Id of the last entry read, or where reading began.
        self.position = since

    async def start(self) -> None:
        """Fix the position at which reading begins, in a trace that exists."""
        self.assume_exists()
        with bus_errors():
            await self._entries.start()
        if self.position in ("now", "recent"):
            attempt, seq = self._entries.last
            self.position = f"{attempt}-{seq}"

    @property
    def ready(self) -> bool:
        """Whether an event is here. Its saves may still stand in a bulk store."""
        return self._unreturned is not None or self._entries.ready

    def assume_exists(self, *, new: bool = False) -> None:
        """Have a missing stream raise an error: the caller knows that the trace exists. A `new` one has few events."""
        self._entries.expect(new=new)

    async def next(self, fold: Fold | None = None) -> Event | None:
        """The next event, folded into `fold` first if there is one; `None` after the final, or once this is closed.

        A gap replaces the folded state by its own. An event whose saves are out of reach is folded without them.

        Raises:
            MalformedEvent: it cannot be read, or does not follow the folded events.
            UnverifiedFinal: it is a final that no engine has signed that the client trusts.
            ClientTooOld: it is of a newer schema than this client reads.
            EventsLost: events were removed, and there is no snapshot of the state after them.
            TraceForgotten: the trace was removed.
            ClientClosed: the client was closed meanwhile.
            BusRefused: Redis refuses to go on.
        """
        while True:
            try:
                entry: Entry | EntryGap = (
                    self._unreturned if self._unreturned is not None else await anext(self._entries)
                )
            except StopAsyncIteration:
                return None
            except (anyio.ClosedResourceError, BusError) as error:
                if self._closed:
                    return None
                if isinstance(error, EntriesLost):
                    raise EventsLost(self.trace_id, error.since, error.until) from error
                if isinstance(error, StreamGone):
                    raise TraceForgotten(self.trace_id, error.since) from error
                raise connect_error(error) from error
            if isinstance(entry, EntryGap):
                gap = Gap(self.trace_id, entry, self._large.load)
                if fold is not None:
                    fold.resume(gap.snapshot())
                self.position, self.entry = gap.until, None
                return gap
            event = self._decode(entry)
            if isinstance(event, Saving):
                self._unreturned = entry
                where = self._bulk_range(event)
                if where is not None:
                    await self._fetch_bulk(event, where)
                self._unreturned = None
            self.position, self.entry = entry.id, entry
            if event is None:
                if fold is not None:
                    _skip(fold, entry)
                continue
            if fold is not None:
                try:
                    fold.apply(event, event.lost if isinstance(event, Saving) else None)
                except ValueError as error:
                    raise MalformedEvent(f"trace {self.trace_id}: {error}") from error
            return event

    def _decode(self, entry: Entry) -> AnyEvent | None:
        try:
            check_schema(entry.schema)
            event = decode_event(entry.data, Output, Shared, self._large.load)
        except NewerSchema as error:
            raise ClientTooOld(f"trace {self.trace_id}, event {entry.id}: {error}") from error
        except UnknownKind as error:
            logger.warning("trace %s: skipping event %s: %s", self.trace_id, entry.id, error)
            return None
        except msgspec.MsgspecError as error:
            raise MalformedEvent(f"trace {self.trace_id}: event {entry.id} cannot be read: {error}") from error
        if isinstance(event, Final) and not self._is_genuine(self.trace_id, entry.data, event):
            raise UnverifiedFinal(self.trace_id, event)
        if isinstance(event, Final) and event.error is not None and event.error.type == MISSING:
            # The next trace that has the vector stores it again.
            self._vectors.forget()
        if isinstance(event, Saving):
            # The saves are decoded when a caller asks for them.
            event.__dict__["_loader"] = self._large.load
        return event

    def _bulk_range(self, event: Saving) -> BulkRange | None:
        """Where in a bulk store an event's saves are, if they are in one."""
        try:
            return bulk_range(event.encoded_deltas)
        except msgspec.MsgspecError as error:
            raise MalformedEvent(f"trace {self.trace_id}: event {event.id} cannot be read: {error}") from error

    async def _fetch_bulk(self, event: Saving, where: BulkRange) -> None:
        """Fetch an event's saves from a bulk store. On failure, reading them raises `ValueMissing`."""
        if not self._saves:
            event.lose_saves(ValueMissing.of_event(self.trace_id, event.id, "its reader asked for no saves"))
            return
        backoff = Backoff()
        while True:
            try:
                event.encoded_deltas = msgspec.Raw(await self._bulk.read(where))
            except BulkMissing as error:
                event.lose_saves(ValueMissing.of_event(self.trace_id, event.id, str(error)))
            except BusUnavailable as error:
                outages.log(backoff.level, "the saves of trace %s wait for Redis: %s", self.trace_id, error)
                await anyio.sleep(backoff.next())
                continue
            return

    async def aclose(self) -> None:
        """Stop reading. Idempotent."""
        self._closed = True
        await self._entries.aclose()


def _skip(fold: Fold, entry: Entry) -> None:
    """Count an event of a kind that this version does not know: it has a sequence number, too."""
    attempt, _, seq = entry.id.partition("-")
    if (int(attempt), int(seq)) == (fold.attempt, fold.seq + 1):
        fold.seq += 1
