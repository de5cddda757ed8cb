"""Records of traces: what the bus knows of each from its submission on, and what may be asked of one that runs.

A trace's record is a hash beside its stream: who submitted it, which engine runs it in which attempt, its deadline, and
its live parameters with their version and forms. It is changed by scripts only, each of which sees the record and the
stream at one moment, so that a change is accepted or refused as a whole, cancelled traces never start, and a trace ends
once:

- *steering* checks names, forms and version, numbers the change, keeps it until an event has told of it, and puts it
  on the control stream of the engine that runs the trace, if one does;
- *opening* is an engine's claim to run it, by the number under which it took it from the queue: the highest runs;
- *cancelling* asks that engine, or ends the trace at once where none runs it;
- *sweeping* ends what is past its deadline and runs nowhere.

Whoever ends a trace from outside writes its final event as one of an attempt that follows the last: readers take it as
the end of what came before, and Redis refuses whatever an engine would still append.

Everything that a script touches has the trace's hash tag. A script that makes up keys is given one besides that never
exists (see `cluster.py`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from tracewire_bus.transport.errors import BusError
from tracewire_bus.transport.guard import GREATEST, Guard, integer
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.scripts import Script
from tracewire_bus.wire.codec import decode_event, encode, schema_text
from tracewire_bus.wire.ids import FINAL_ID, is_encodable
from tracewire_bus.wire.live_values import LiveValue, pack_live, unpack_live
from tracewire_bus.wire.messages import Failure, Status, Submission, Waiting
from tracewire_bus.wire.messages import Final as FinalEvent
from tracewire_bus.wire.packing import unpack

from .keys import Keys
from .queue_entries import REMEMBER_S

__all__ = [
    "LiveState",
    "Opened",
    "Overtaken",
    "Records",
    "SteerRefused",
    "TraceElsewhere",
    "TraceEnded",
    "TraceMissing",
]

#: How many changes of one trace may wait for their engine.
MAX_CHANGES: Final = 10_000
#: How long the engine that runs a trace has from its deadline on to end it itself, in milliseconds.
GRACE_MS: Final = 5000
#: The farthest deadline, in milliseconds from the submission: some 3000 years, which Lua writes as an integer.
MAX_DEADLINE_MS: Final = 10**14
#: How long a control stream is kept after its last entry, in seconds.
CONTROL_S: Final = 24 * 3600

#: Stands in an encoded event for the attempt, or the number, that the script puts there.
_ATTEMPT: Final = 2**32 - 1
_MARK: Final = b"\xce\xff\xff\xff\xff"

# Fields of a record: m model, c client, p lease, t deadline (ms), e engine, a attempts, s state, v version of the live
# parameters, x why it was cancelled and xb by whom, z by whom it was paused and zn how often that was changed, r for
# how long it is kept after its end (s), l:NAME a live value packed, f:NAME its form.

_CREATE: Final = Script("record_create")
_FORGET: Final = Script("record_forget")
_OPEN: Final = Script("record_open")
_CLAIM: Final = Script("record_claim")
_CLOSE: Final = Script("record_close")
_END: Final = Script("record_end")
_WAIT: Final = Script("record_wait")
_STEER: Final = Script("record_steer")
_CANCEL: Final = Script("record_cancel")
_PAUSE: Final = Script("record_pause")
_SWEEP: Final = Script("record_sweep")


class SteerRefused(BusError, ValueError):
    """A change that was not accepted. `reason` is `undeclared`, `form`, `version` or `busy`; `name` the parameter.

    `declared` is the form that it was declared with, for `form`; all declared names, for `undeclared`. `version` is
    the present one, for `version`.
    """

    def __init__(self, reason: str, message: str, *, name: str = "", declared: str = "", version: int = 0) -> None:
        super().__init__(message)
        self.reason = reason
        self.name = name
        self.declared = declared
        self.version = version


class TraceMissing(BusError, LookupError):
    """No such trace was submitted, or it has been forgotten."""


class Overtaken(BusError):
    """Another engine runs the trace."""


class TraceElsewhere(BusError, ValueError):
    """The trace's id belongs to a trace of another model."""


class TraceEnded(BusError):
    """The trace has ended: nothing about it can change any more."""


@dataclass(frozen=True, slots=True)
class LiveState:
    """A trace's live parameters: their version, and their values by name."""

    version: int
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Opened:
    """A trace that an engine begins to run. `left_s` is what is left of its time, `None` if it has no deadline.

    `live` holds its live parameters as they are now, packed, of version `version`; `changes` those that no event tells
    of yet, encoded, in order. `cancelled` says by whom and why, if it was; `paused` by whom, if it is to be held, and
    `pauses` how often that was changed.
    """

    attempt: int
    left_s: float | None
    version: int
    live: bytes
    changes: list[bytes] = field(default_factory=list)
    cancelled: tuple[str, str] | None = None
    paused: str | None = None
    pauses: int = 0


class Records:
    """The records of all traces on one bus."""

    def __init__(self, connections: Connections, keys: Keys, retention_s: float) -> None:
        self._connections = connections
        self._keys = keys
        self._retention_s = max(1, round(retention_s))
        self._guard: Guard = connections.guard

    def _base(self, tag: str) -> str:
        """What precedes every key of a hash tag."""
        return f"{self._keys.prefix}:{{{tag}}}:"

    # --- a trace's life -----------------------------------------------------------------------------------------------

    def create_command(
        self, submission: Submission, live: Mapping[str, LiveValue], retention_s: float | None = None
    ) -> tuple[Any, ...]:
        """The command that makes the record of a trace about to be queued, with its live parameters; once.

        `retention_s` is how long its engines keep it after its end, if that is known.
        """
        trace = submission.trace
        deadline = submission.deadline_s
        return _CREATE(
            self._named(trace),
            *(trace, submission.model, submission.client, "" if submission.detach else submission.lease),
            *("" if deadline is None else round(min(deadline * 1000, MAX_DEADLINE_MS)), REMEMBER_S),
            "" if retention_s is None else max(1, round(retention_s)),
            *_flat(live),
        )

    async def forget(self, trace: str, model: str) -> None:
        """Take back the record of a trace that was not queued for `model` after all."""
        await self._connections.command(*_FORGET(self._named(trace), trace, model))

    def _named(self, trace: str) -> tuple[str, str, str]:
        keys, tag = self._keys, self._keys.tag(trace)
        return keys.record(trace), keys.deadlines(tag), keys.firehose(tag)

    async def open(self, trace: str, engine: str, attempt: int = 1) -> Opened:
        """Begin to run a trace on `engine` as this attempt; orders for it go there from now on.

        It may be asked again after an answer was lost.

        Raises:
            TraceEnded: it has ended already.
            Overtaken: another engine has begun this attempt, or a later one.
            Malformed: its record cannot be read.
        """
        keys = self._keys
        reply = await self._connections.command(
            *_OPEN(
                (keys.record(trace), keys.events(trace), keys.changes(trace)),
                *(engine, REMEMBER_S, attempt, self._retention_s),
            )
        )
        if isinstance(reply, bytes):
            if reply == b"ended":
                raise TraceEnded(f"trace {trace} has ended")
            raise Overtaken(f"attempt {attempt} of trace {trace} is not the last one, or another engine's")
        return self._guard.demand(_opened, *reply, key=keys.record(trace))

    def claim_command(
        self,
        trace: str,
        engine: str,
        attempt: int,
        *,
        closed: bool,
        version: int,
        live: Mapping[str, bytes],
        paused: str | None,
        pauses: int,
    ) -> tuple[Any, ...]:
        """The command by which an engine says again that it runs this attempt, with the live parameters that it has.

        `paused` is who has paused it, if somebody has, after `pauses` pauses and resumptions. A record that knows of
        more keeps what it says.

        Nothing where a later attempt, or another engine, has begun. It may be carried out again.
        """
        return _CLAIM(
            (self._keys.record(trace), self._keys.events(trace)),
            *(attempt, engine, "closed" if closed else "running", version, REMEMBER_S),
            # Nobody in particular is somebody, too.
            "" if paused is None else paused or "somebody",
            pauses,
            *(part for pair in live.items() for part in pair),
        )

    async def overtaken(self, engine: str, attempts: Sequence[tuple[str, int]]) -> list[bool]:
        """Of each of these traces, whether it has ended, or another engine or a later attempt has begun, since `engine`
        began this one, whose events are refused then.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        if not attempts:
            return []
        replies = await self._connections.commands(
            *(("HMGET", self._keys.record(trace), "a", "e") for trace, _ in attempts),
            *(("XRANGE", self._keys.events(trace), FINAL_ID, FINAL_ID) for trace, _ in attempts),
            alone=True,
        )
        known, finals = replies[: len(attempts)], replies[len(attempts) :]

        def is_overtaken(trace: str, attempt: int, number: bytes | None, by: bytes | None) -> bool:
            if number is None:
                return False
            last = self._guard.read(integer, number, key=self._keys.record(trace), entry="a") or 0
            return last > attempt or (last == attempt and _text(by or b"") != engine)

        return [
            bool(final) or is_overtaken(trace, attempt, number, by)
            for (trace, attempt), (number, by), final in zip(attempts, known, finals, strict=True)
        ]

    async def close(self, trace: str, attempt: int) -> list[bytes]:
        """Accept no more changes of a trace whose end is near, in this attempt, if it is the last one.

        Returns those that no event tells of, in order.
        """
        call = _CLOSE((self._keys.record(trace), self._keys.changes(trace)), attempt)
        return list(await self._connections.command(*call))

    async def end(self, trace: str, status: Status, failure: Failure) -> bool:
        """End a trace here and now, whoever runs it. Returns whether it had not ended before."""
        keys = self._keys
        if not is_encodable(trace):
            return False
        head, tail = _final(status, failure)
        call = _END(
            (keys.record(trace), keys.events(trace)),
            *(trace, self._base(keys.tag(trace)), schema_text(), head, tail, self._retention_s, status, failure.type),
        )
        return bool(await self._connections.command(*call))

    async def wait(self, attempts: Sequence[tuple[str, int]], reason: str) -> int:
        """Tell of these attempts of traces that they are over, and that their traces wait for another engine.

        Returns of how many that is news: nothing is told where a later attempt has been begun, the trace has ended, or
        nothing of the attempt has been told.

        Raises:
            BusUnavailable: Redis stayed away; some may have been told.
        """
        keys, calls = self._keys, []
        for trace, attempt in attempts:
            if is_encodable(trace):
                event = encode(Waiting(attempt=attempt, seq=_ATTEMPT, reason=reason, time=time.time()))
                head, _, tail = event.partition(_MARK)
                names = (keys.record(trace), keys.events(trace))
                calls.append(_WAIT(names, attempt, schema_text(), head + _MARK[:1], tail))
        told = await self._connections.commands(*calls) if calls else []
        return sum(map(int, told))

    async def _final_entry(self, trace: str) -> Any:
        """A list with the entry of its final event, empty if that is not there."""
        return await self._connections.command("XRANGE", self._keys.events(trace), FINAL_ID, FINAL_ID, alone=True)

    async def ended(self, trace: str) -> bool:
        """Whether its final event is there."""
        return bool(await self._final_entry(trace))

    async def failed_as(self, trace: str) -> str | None:
        """The type of the error that a trace has ended with; None if it has not ended so, or cannot be read."""
        found = await self._final_entry(trace)
        if not found:
            return None
        fields = dict(zip(found[0][1][::2], found[0][1][1::2], strict=True))
        try:
            event = decode_event(fields.get(b"d", b""))
        except (ValueError, msgspec.MsgspecError):
            return None
        return event.error.type if isinstance(event, FinalEvent) and event.error is not None else None

    async def left(self, trace: str) -> tuple[bool, float | None]:
        """Whether a trace is known, and how many seconds are left of its time (`None`: it has no deadline)."""
        (model, due), (seconds, micros) = await self._connections.commands(
            ("HMGET", self._keys.record(trace), "m", "t"), ("TIME",)
        )
        now = int(seconds) + int(micros) / 1e6
        at = None if due is None else self._guard.read(_due, due, key=self._keys.record(trace), entry="t")
        return model is not None, None if at is None else at / 1000 - now

    # --- asked of it from outside -------------------------------------------------------------------------------------

    async def live(self, trace: str) -> LiveState:
        """A trace's live parameters as the bus has them now.

        Raises:
            TraceMissing: there is no such trace.
            Malformed: its record cannot be read.
        """
        _check_name(trace)
        flat = await self._connections.command("HGETALL", self._keys.record(trace))
        record: dict[bytes, bytes] = dict(zip(flat[::2], flat[1::2], strict=True))
        if b"m" not in record:
            raise TraceMissing(f"no trace {trace!r}")
        return self._guard.demand(_live_state, record, key=self._keys.record(trace))

    async def steer(
        self,
        trace: str,
        values: Mapping[str, LiveValue],
        *,
        by: str,
        if_version: int | None = None,
    ) -> int:
        """Change live parameters, all of `values` at once, and return the version that this makes.

        It is sent again if the connection breaks under it, and carried out once. `if_version` is the version that they
        must have.

        Raises:
            SteerRefused: it does not fit what was declared, or the version is another.
            TraceEnded: the trace has ended, or is about to.
            TraceMissing: there is no such trace.
            BusUnavailable: Redis stayed away; it may have been accepted.
        """
        _check_name(trace)
        keys = self._keys
        reply = await self._connections.command(
            *_STEER(
                (
                    *(keys.record(trace), keys.events(trace), keys.changes(trace), keys.operations(trace)),
                    keys.control(keys.tag(trace), ""),
                ),
                *(trace, keys.control(keys.tag(trace), ""), _operation(), msgspec.msgpack.encode(by)),
                *(
                    "" if if_version is None else if_version,
                    pack_live({name: one.packed for name, one in values.items()}),
                ),
                *(MAX_CHANGES, REMEMBER_S, CONTROL_S),
                *_flat(values),
            )
        )
        match _text(reply[0]):
            case "accepted":
                return int(reply[1])
            case "unknown":
                raise TraceMissing(f"no trace {trace!r}")
            case "ended":
                raise TraceEnded(f"trace {trace} has ended")
            case "version":
                version = int(reply[1])
                raise SteerRefused(
                    "version", f"the live parameters are at version {version}, not {if_version}", version=version
                )
            case "undeclared":
                name, declared = _text(reply[1]), _text(reply[2])
                message = f"no live parameter {name!r} was declared at submission (declared: {declared or 'none'})"
                raise SteerRefused("undeclared", message, name=name, declared=declared)
            case "form":
                name, declared = _text(reply[1]), _text(reply[2])
                message = f"it was declared as {declared}, got {values[name].form}"
                raise SteerRefused("form", message, name=name, declared=declared)
            case _:
                raise SteerRefused("busy", f"{MAX_CHANGES} changes of this trace wait for its engine")

    async def cancel(self, trace: str, *, by: str, reason: str, force: bool = False) -> tuple[str, str]:
        """End a trace as `cancelled`. Returns the engine that was asked to and `""`, or `""` and the trace's model if
        none runs it: then it has ended, and may wait on its queue still.

        With `force` it is ended here and now, whoever runs it. A second call asks for nothing more. One that is sent
        again, because the connection broke under it, is told the same.

        Raises:
            TraceEnded: it had ended before.
            TraceMissing: there is no such trace.
        """
        _check_name(trace)
        keys = self._keys
        tag = keys.tag(trace)
        head, tail = _final("cancelled", cancellation(by, reason))
        reply = await self._connections.command(
            *_CANCEL(
                (keys.record(trace), keys.events(trace), keys.operations(trace), keys.control(tag, "")),
                *(trace, self._base(tag), keys.control(tag, ""), by, reason, schema_text(), head, tail),
                *(self._retention_s, "1" if force else "", CONTROL_S, _operation(), REMEMBER_S),
            )
        )
        match _text(reply[0]):
            case "unknown":
                raise TraceMissing(f"no trace {trace!r}")
            case "ended":
                raise TraceEnded(f"trace {trace} has ended")
            case "asked":
                return _text(reply[1]), ""
            case _:
                return "", _text(reply[1])

    async def pause(self, trace: str, *, by: str, resume: bool = False) -> bool:
        """Have a trace held where it is, or, with `resume`, go on. Returns whether that changes anything.

        It is sent again if the connection breaks under it, and carried out once.

        Raises:
            TraceEnded: it has ended, or is about to.
            TraceMissing: there is no such trace.
        """
        _check_name(trace)
        keys = self._keys
        names = keys.record(trace), keys.events(trace), keys.operations(trace)
        reply = await self._connections.command(
            *_PAUSE(
                (*names, keys.control(keys.tag(trace), "")),
                *(trace, keys.control(keys.tag(trace), ""), "resume" if resume else "pause", by, CONTROL_S),
                *(_operation(), REMEMBER_S),
            )
        )
        match _text(reply):
            case "unknown":
                raise TraceMissing(f"no trace {trace!r}")
            case "ended":
                raise TraceEnded(f"trace {trace} has ended")
            case answer:
                return answer == "asked"

    async def sweep(self, tags: Sequence[str]) -> list[tuple[str, str]]:
        """End what is past its deadline and runs nowhere, among the traces of these hash tags.

        Returns them, each with its model: they may wait on its queue still.
        """
        failure = Failure(type="DeadlineExceeded", message="its deadline passed before it had ended", field="deadline")
        head, tail = _final("expired", failure)
        replies = await self._connections.commands(
            *(
                _SWEEP(
                    (self._keys.deadlines(tag), self._keys.control(tag, "")),
                    *(self._base(tag), schema_text(), head, tail, self._retention_s, GRACE_MS),
                )
                for tag in tags
            )
        )
        return [
            (_text(trace), _text(model))
            for reply in replies
            for trace, model in zip(reply[::2], reply[1::2], strict=True)
        ]


def _operation() -> str:
    """An id by which what is sent again is done once."""
    return secrets.token_hex(8)


def _opened(now: int, flat: Sequence[bytes], changes: Sequence[bytes]) -> Opened:
    record: dict[bytes, bytes] = dict(zip(flat[::2], flat[1::2], strict=True))
    due = record.get(b"t")
    cancelled = record.get(b"x")
    live = pack_live(_live(record))
    unpack_live(live)
    return Opened(
        attempt=integer(record[b"a"], 1),
        left_s=None if due is None else (_due(due) - integer(now)) / 1000,
        version=integer(record.get(b"v", 0)),
        live=live,
        changes=list(changes),
        cancelled=None if cancelled is None else (_text(record.get(b"xb", b"")), _text(cancelled)),
        paused=None if b"z" not in record else _text(record[b"z"]),
        pauses=integer(record.get(b"zn", 0)),
    )


def _due(raw: bytes) -> int:
    """A deadline, in milliseconds since the epoch."""
    return integer(raw, -GREATEST)


def _live_state(record: Mapping[bytes, bytes]) -> LiveState:
    values = {name: unpack(packed) for name, packed in _live(record).items()}
    return LiveState(integer(record.get(b"v", 0)), values)


def _check_name(trace: str) -> None:
    if not is_encodable(trace):
        raise TraceMissing(f"no trace {trace!r}")


def cancellation(by: str, reason: str) -> Failure:
    """What a cancelled trace ends with."""
    message = f"cancelled by {by or 'somebody'}" + (f": {reason}" if reason else "")
    return Failure(type="Cancelled", message=message, by=by, reason=reason)


def _final(status: Status, failure: Failure) -> tuple[bytes, bytes]:
    """An encoded final event, before and after the number of its attempt."""
    event = FinalEvent(attempt=_ATTEMPT, seq=0, status=status, error=failure, time=time.time())
    head, mark, tail = encode(event).partition(_MARK)
    assert mark
    return head + mark[:1], tail


def _flat(values: Mapping[str, LiveValue]) -> list[Any]:
    return [part for name, value in values.items() for part in (name, value.form, value.packed)]


def _live(record: Mapping[bytes, bytes]) -> dict[str, bytes]:
    """The live parameters in a record, packed, by name."""
    return {field[2:].decode(): packed for field, packed in record.items() if field.startswith(b"l:")}


def _text(data: bytes | str) -> str:
    return data if isinstance(data, str) else data.decode("utf-8", "replace")
