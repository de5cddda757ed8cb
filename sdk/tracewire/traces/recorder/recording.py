"""A recording of a trace: its events, its submission, who ran it, and how it was steered. It needs no engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tracewire.checks import shown
from tracewire.error_mapping import bus_errors
from tracewire.errors import InvalidRecording, MalformedEvent, ValueMissing
from tracewire.traces.event_reader import EventReader
from tracewire.traces.output import Accepted, Event, Final, Gap, Output, Restarted, Saving, Shared, Steered
from tracewire.traces.state import State
from tracewire.traces.whole_submission import whole_submission
from tracewire_bus.bus import BusError
from tracewire_bus.bus import Gap as EntryGap
from tracewire_bus.domain.fold import Fold
from tracewire_bus.store.snapshots import Stored
from tracewire_bus.wire.bulk_ranges import bulk_range
from tracewire_bus.wire.codec import check_schema, decode_event, decode_submission, encode
from tracewire_bus.wire.messages import Columns, Snapshot
from tracewire_bus.wire.refs import ArrayRef
from tracewire_bus.wire.signing import unwrap

from .container import MOST, Content, Engine, parse_content, read_content, write_content

if TYPE_CHECKING:
    from tracewire.traces.session import Session
    from tracewire_bus.bus import Bus, Entry
    from tracewire_bus.wire.messages import Submission

__all__ = ["Recording", "Steering", "record"]


class Steering(msgspec.Struct, frozen=True):
    """A change of live parameters in a recording, for one choice: it held from the token `index` on."""

    index: int
    values: dict[str, Any]
    by: str
    time: float
    invoke: int = 0
    choice: int = 0


class Recording:
    """A trace in one file: events, submission, steering, versions. Made by `Client.record`, read by `Recording.open`.

    It is shown and folded without an engine and without Redis. `Client.replay` runs it again.

    Attributes:
        trace_id, model: of the trace.
        made_at: when it was recorded, in seconds since the epoch. `made_by`: by which client.
        complete: whether it has the trace's end.
    """

    def __init__(self, content: Content) -> None:
        self._content = content
        self.trace_id, self.model = content.trace, content.model
        self.made_at, self.made_by, self.complete = content.made_at, content.made_by, content.complete
        self._submission: Submission | None = None

    @classmethod
    def open(cls, path: str | PathLike[str]) -> Recording:
        """Read a file.

        Raises:
            InvalidRecording: it is no recording, of a later version, or damaged.
            OSError: it cannot be read.
        """
        return cls(read_content(path))._checked(str(path))

    @classmethod
    def from_bytes(cls, data: bytes, *, most: int = MOST, values: int | None = None) -> Recording:
        """Read the content of a file, which may unpack to `most` bytes. With `values`, its events may have so many.

        Raises:
            InvalidRecording: it is no recording, of a later version, damaged, or too large.
        """
        return cls(parse_content(data, "", most, values))._checked("")

    def _checked(self, name: str) -> Recording:
        try:
            for _ in self.events():
                pass
            _ = self.submission
        except (msgspec.MsgspecError, ValueError, MalformedEvent) as error:
            raise InvalidRecording(name, f"an event of it cannot be read: {error}") from error
        return self

    def save(self, path: str | PathLike[str]) -> None:
        """Write the file, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        write_content(path, self._content)

    @property
    def submission(self) -> Submission | None:
        """What was submitted, with all arrays; `None` if the one who recorded could not read it."""
        if self._submission is None and self._content.submission is not None:
            self._submission = decode_submission(self._content.submission)
        return self._submission

    @property
    def engine(self) -> Engine:
        """The engine that ran the last attempt, with the versions of its packages and the digest of its model."""
        return self._content.engine

    def events(self) -> Iterator[Event]:
        """The events, as `Client.subscribe` yields them."""
        for kind, schema, data in self._content.events:
            check_schema(schema)
            if kind.startswith("gap"):
                _, since, until = kind.split(" ")
                yield Gap(self.trace_id, EntryGap(since, until, Stored(*_numbers(until), schema, data)), self._load)
                continue
            event = decode_event(data, Output, Shared, self._load)
            if isinstance(event, Saving):
                event.__dict__["_loader"] = self._load
            yield event

    def state(self) -> State:
        """The state at the end of the recording, folded."""
        fold = Fold()
        for event in self.events():
            if isinstance(event, Gap):
                fold.resume(event.snapshot())
            else:
                fold.apply(event)
        return State(self.trace_id, fold)

    @property
    def accepted(self) -> Accepted | None:
        """The event by which an engine took the last attempt."""
        return self._last_attempt()[0]

    def steering(self) -> list[Steering]:
        """How the last attempt was steered, for each choice in the order of tokens."""
        found = []
        for event in self._last_attempt()[1]:
            values: dict[str, Any] = {}
            for change in event.changes:
                values |= change.values
            by = event.changes[-1].by if event.changes else ""
            found += [Steering(one.index, values, by, event.time, one.invoke, one.choice) for one in event.first]
        return sorted(found, key=lambda one: (one.invoke, one.choice, one.index))

    def lacks_steering(self) -> bool:
        """Whether the last attempt's stream was trimmed behind changes of live parameters, which are not in it."""
        lacks, version, attempt = False, 0, 0
        for event in self.events():
            after = event.snapshot() if isinstance(event, Gap) else event
            if after.attempt > attempt:
                lacks, version, attempt = False, 0, after.attempt
            if isinstance(event, Accepted):
                version = event.live_version
            elif isinstance(event, Steered):
                version = event.version
            elif isinstance(after, Snapshot):
                begun = after.accepted.live_version if after.accepted is not None else 0
                lacks = lacks or after.live_version > max(version, begun)
                version = after.live_version
        return lacks

    def _last_attempt(self) -> tuple[Accepted | None, list[Steered]]:
        accepted: Accepted | None = None
        steered: list[Steered] = []
        for event in self.events():
            if isinstance(event, Restarted):
                accepted, steered = None, []
            elif isinstance(event, Accepted):
                accepted, steered = event, []
            elif isinstance(event, Steered):
                steered.append(event)
            elif isinstance(event, Gap):
                accepted = event.snapshot().accepted or accepted
        return accepted, steered

    async def _load(self, ref: ArrayRef) -> Any:
        """The array of a reference, from the file."""
        from tracewire_bus.wire.arrays import array_from_raw

        data = self._content.arrays.get(ref.blob)
        if data is None:
            raise ValueMissing(self.trace_id, ref.name, "the recording has only a reference to it (arrays='reference')")
        return array_from_raw(ref.dtype, ref.shape, bytearray(data))

    def __repr__(self) -> str:
        end = "" if self.complete else ", incomplete"
        return f"<Recording of {self.trace_id} of {self.model}: {len(self._content.events)} events{end}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """The trace as notebooks show it."""
        return {**self.state()._repr_mimebundle_(), "text/plain": repr(self)}


async def record(
    session: Session,
    trace_id: str,
    *,
    submission: Submission | None = None,
    arrays: Literal["inside", "reference"] = "inside",
    until_now: bool = False,
) -> Recording:
    """Record a trace: to its end, or with `until_now` up to its last event at the time of the call."""
    if arrays not in ("inside", "reference"):
        raise ValueError(f"arrays: expected 'inside' or 'reference', got {shown(arrays)}")
    bus = session.open_bus()
    content = Content(
        trace=trace_id, model="", made_at=time.time(), made_by=session.name, references=arrays == "reference"
    )
    if submission is None:
        submission = await _queued(bus, trace_id)
    if submission is not None:
        # Before the trace ends and its blobs expire.
        with bus_errors():
            submission = await whole_submission(submission, trace_id, bus)
        content.model, content.submission = submission.model, encode(submission)
    last = None
    if until_now:
        with bus_errors():
            last = await bus.tail_id(trace_id)
    await _read(EventReader(trace_id, bus, "start"), content, last)
    await _describe(session, content)
    return Recording(content)


async def _read(reader: EventReader, content: Content, last: str | None) -> None:
    """Take the events of a trace, up to `last` or to its end."""
    from tracewire_bus.wire.ids import parse_id

    content.complete = False
    end = None if last is None else parse_id(last)
    try:
        await reader.start()
        while not content.complete and (end is None or parse_id(_position(reader)) < end):
            event = await reader.next()
            if event is None:
                return
            if isinstance(event, Gap):
                if not content.references:
                    await _take_held_arrays(event, content.arrays)
                content.events.append((f"gap {event.since} {event.until}", event._schema, bytes(event._data)))
                continue
            if not content.references:
                await _take_arrays(event, content.arrays)
            assert reader.entry is not None
            content.events.append((event.type, reader.entry.schema, _encoded(event, reader.entry)))
            if isinstance(event, Accepted):
                content.model = content.model or event.model
            content.complete = isinstance(event, Final)
    finally:
        await reader.aclose()


def _encoded(event: Any, entry: Entry) -> bytes:
    """An event as it is on the stream; with its saves, if they are in a bulk store."""
    stored = decode_event(entry.data, Output, Shared) if isinstance(event, Saving) else None
    if isinstance(stored, Saving) and bulk_range(stored.encoded_deltas) is not None:
        return encode(event)
    return bytes(entry.data)


def _numbers(id_: str) -> tuple[int, int]:
    attempt, _, seq = id_.partition("-")
    return int(attempt), int(seq)


def _position(reader: EventReader) -> str:
    return "0-0" if reader.position == "start" else reader.position


async def _take_arrays(event: Any, arrays: dict[str, bytes]) -> None:
    """Download the large arrays to which an event refers."""
    if isinstance(event, Saving):
        steps = event.deltas
    elif isinstance(event, Final):
        steps = [deltas for _, _, deltas in event.deltas]
    else:
        return
    for step in steps:
        for change in step:
            if isinstance(change, Columns):
                continue
            for ref in _references(getattr(change, "items", None) or getattr(change, "value", None)):
                if ref.blob not in arrays:
                    arrays[ref.blob] = (await ref.load()).tobytes()


async def _take_held_arrays(gap: Gap, arrays: dict[str, bytes]) -> None:
    """Download the large arrays to which the state behind trimmed events refers."""
    for choice in gap.snapshot().choices:
        for ref in _references(choice.saves):
            if ref.blob not in arrays:
                arrays[ref.blob] = (await ref.load()).tobytes()


def _references(value: Any) -> Iterator[ArrayRef]:
    if isinstance(value, ArrayRef):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _references(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _references(item)


async def _queued(bus: Bus, trace_id: str) -> Submission | None:
    """The submission of a trace that has not ended, if this client may read it."""
    try:
        model = await bus.command("HGET", bus.keys.record(trace_id), "m")
        if model is None:
            return None
        data = await bus.command("HGET", bus.keys.queue(model.decode("utf-8", "replace"), "data"), trace_id)
        return None if data is None else decode_submission(unwrap(bytes(data))[1])
    except (BusError, ValueError):
        return None


async def _describe(session: Session, content: Content) -> None:
    """Say who ran the trace."""
    from importlib.metadata import version

    content.tracewire = version("tracewire")
    accepted = Recording(content).accepted
    if accepted is None:
        return
    engine = content.engine = Engine(
        engine=accepted.engine,
        revision=accepted.revision,
        dtype=accepted.dtype,
        versions={name: value for name, value in msgspec.to_builtins(accepted.versions).items() if value},
    )
    with bus_errors():
        for one in await session.models.engines(accepted.model):
            if one.engine == accepted.engine:
                engine.host, engine.path = one.host, one.path
