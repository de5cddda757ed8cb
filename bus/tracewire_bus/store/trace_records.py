"""Records of traces: the state of each trace from its submission on, and the operations on a running trace.

A trace's record is a hash beside its stream. It holds the client that submitted the trace, the engine and attempt that
run it, its deadline, and its live parameters with their version and forms. Only scripts change a record. Each script
sees the record and the stream at one moment. So a change is accepted or refused as a whole, a cancelled trace never
starts, and a trace ends once.

- *Steering* checks names, forms and version, numbers the change, and keeps it until an event has reported it. If an
  engine runs the trace, the script puts the change on that engine's control stream.
- *Opening* is an engine's claim to run the trace, under the attempt number of its take. The highest attempt runs.
- *Cancelling* asks the engine that runs the trace, or ends the trace at once if no engine runs it.
- *Sweeping* ends traces that are past their deadline and that no engine runs.

When another process than the trace's engine ends the trace, the final event has the number of a next attempt. Readers
take it as the end of the events before it, and Redis refuses later events of the engine.

All keys that a script uses have the trace's hash tag. A script that builds keys from names also takes a key of that tag
that never exists (see `cluster.py`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from tracewire_bus.domain.limit_table import DEFAULTS, Limits
from tracewire_bus.transport.errors import BusError
from tracewire_bus.transport.guard import integer
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.scripts import Script
from tracewire_bus.wire.codec import encode, schema_text
from tracewire_bus.wire.ids import is_encodable
from tracewire_bus.wire.live_values import LiveValue, pack_live, unpack_live
from tracewire_bus.wire.messages import Failure, Status, Submission, Waiting
from tracewire_bus.wire.messages import Final as FinalEvent
from tracewire_bus.wire.packing import unpack

from .keys import Keys
from .proofs import Proofs, cancel_content, change_content, pause_content
from .queue_entries import REMEMBER_S
from .record_reads import RecordReads, TraceMissing, check_name, deadline_ms, text_of

__all__ = [
    "LiveState",
    "NonceMark",
    "Opened",
    "Overtaken",
    "Records",
    "Replayed",
    "SteerRefused",
    "TraceElsewhere",
    "TraceEnded",
    "TraceMissing",
    "unpause_command",
]

#: How long after a trace's deadline its own engine may end it before `sweep` does, in milliseconds.
GRACE_MS: Final = 5000
#: The latest deadline, in milliseconds from the submission: about 3000 years, which Lua still writes as an integer.
MAX_DEADLINE_MS: Final = 10**14
#: How long Redis keeps a control stream after its last entry, in seconds.
CONTROL_S: Final = 24 * 3600

#: Placeholder in an encoded event for the attempt or sequence number that the script writes there.
_ATTEMPT: Final = 2**32 - 1
_MARK: Final = b"\xce\xff\xff\xff\xff"

# Fields of a record: m model, c client, p lease, t deadline (ms), e engine, a attempt, s state, v version of the live
# parameters, x reason of the cancellation, xb who cancelled, z who paused, zn count of pauses and resumptions,
# zt when the pause ends (ms), zw the seconds that its author gave it, zo what the engine does then,
# lw, lr limits on changes, ls, ln their rate, r retention after the end (s), l:NAME a packed live value, f:NAME its
# form, g:NAME the signed change that has set it, k the id of the key that has signed the submission, xg and zg the
# proofs of x and z.

_CREATE: Final = Script("record_create")
_FORGET: Final = Script("record_forget")
_OPEN: Final = Script("record_open")
_LEAVE: Final = Script("record_leave")
_CLAIM: Final = Script("record_claim")
_CLOSE: Final = Script("record_close")
_END: Final = Script("record_end")
_WAIT: Final = Script("record_wait")
_STEER: Final = Script("record_steer")
_CANCEL: Final = Script("record_cancel")
_PAUSE: Final = Script("record_pause")
_UNPAUSE: Final = Script("record_unpause")
_SWEEP: Final = Script("record_sweep")
_RESTORE: Final = Script("record_restore")


class SteerRefused(BusError, ValueError):
    """A change of live parameters was refused.

    Attributes:
        reason: `undeclared` (there is no such parameter), `form` (the value's type, dtype or shape differs), `version`
            (the present version is not the expected one) or `busy` (too many changes wait).
        name: the parameter, for `undeclared` and `form`.
        declared: for `form`, the declared form; for `undeclared`, all declared names.
        version: for `version`, the present version.
    """

    def __init__(self, reason: str, message: str, *, name: str = "", declared: str = "", version: int = 0) -> None:
        super().__init__(message)
        self.reason = reason
        self.name = name
        self.declared = declared
        self.version = version


class Overtaken(BusError):
    """Another engine, or a later attempt, runs the trace."""


class Replayed(BusError):
    """An attempt as late has had this signed submission."""


class TraceElsewhere(BusError, ValueError):
    """A trace of this id was submitted to another model."""


class TraceOfAnother(BusError, ValueError):
    """A trace of this id was submitted by another key."""


class TraceEnded(BusError):
    """The trace has ended, so the operation has no effect."""


class LiveState(msgspec.Struct, frozen=True):
    """A trace's live parameters: their version, and their values by name."""

    version: int
    values: dict[str, Any]


class NonceMark(NamedTuple):
    """Marks the nonce of a signed submission as taken by an attempt, so that no copy of the submission runs.

    `key` is the id of the key that has signed it. `word` is random, and the same whenever the attempt is begun again.
    """

    key: str
    nonce: bytes
    word: str


class Opened(msgspec.Struct, frozen=True):
    """A trace's record as an engine opens the trace.

    Attributes:
        attempt: the attempt that the engine runs.
        now: the time at Redis, in seconds since the epoch.
        left_s: seconds until the deadline, negative after it; None without a deadline.
        version: version of the live parameters.
        live: the live parameters at that version, packed.
        changes: the changes that no event has reported yet, encoded, in order.
        cancelled: who cancelled the trace, and the reason; None if it is not cancelled.
        paused: who paused the trace; None if it is not paused.
        pauses: count of its pauses and resumptions.
        pause_left_s: seconds until the pause ends; None if it has no end.
        pause_within_s, pause_then: how long the pause's author had it last, and what the engine does then.
        cancel_proof, pause_proof: the signatures of these; empty without one.
        live_proofs: for each live parameter that a signed change has set, that change, encoded.
    """

    attempt: int
    now: float
    left_s: float | None
    version: int
    live: bytes
    changes: list[bytes] = msgspec.field(default_factory=list)
    cancelled: tuple[str, str] | None = None
    paused: str | None = None
    pauses: int = 0
    pause_left_s: float | None = None
    pause_within_s: float | None = None
    pause_then: str = ""
    cancel_proof: bytes = b""
    pause_proof: bytes = b""
    live_proofs: dict[str, bytes] = {}


class Records(RecordReads):
    """The records of all traces on one bus.

    `retention_s` is how long Redis keeps a trace after its end, in seconds, unless its record says another time.
    """

    def __init__(self, connections: Connections, keys: Keys, retention_s: float, proofs: Proofs | None = None) -> None:
        super().__init__(connections, keys)
        self._proofs = proofs or Proofs()
        self._retention_s = max(1, round(retention_s))

    def _base(self, tag: str) -> str:
        """The prefix of all keys of a hash tag."""
        return f"{self._keys.prefix}:{{{tag}}}:"

    # --- a trace's life -----------------------------------------------------------------------------------------------

    def create_command(
        self,
        submission: Submission,
        live: Mapping[str, LiveValue],
        retention_s: float | None = None,
        owner: str = "",
    ) -> tuple[Any, ...]:
        """The command that creates the record of a trace before the trace is queued. A repeat has no effect.

        `live` are the first values of its live parameters. `retention_s` is how long the model's engines keep the trace
        after its end, in seconds, if the client knows that. `owner` is what `owner()` returns later.
        """
        trace = submission.trace
        deadline = submission.deadline_s
        return _CREATE(
            (self._keys.record(trace),),
            *(trace, submission.model, submission.client, "" if submission.detach else submission.lease),
            *("" if deadline is None else round(min(deadline * 1000, MAX_DEADLINE_MS)), REMEMBER_S),
            "" if retention_s is None else max(1, round(retention_s)),
            "" if self._proofs.signer is None else self._proofs.signer.id,
            owner,
            *_flat(live),
        )

    async def owner(self, trace: str) -> str | None:
        """The owner that the submission named by which a trace's record was made; None without a record.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        model, owner = await self._connections.command("HMGET", self._keys.record(trace), "m", "o")
        return None if model is None else text_of(owner or b"")

    async def forget(self, trace: str, model: str) -> bool:
        """Remove the record of a trace that the queue of `model` has refused.

        Returns False if the record stays: no such record, another model's, or an engine runs the trace or has ended it.
        """
        call = _FORGET((self._keys.record(trace), self._keys.events(trace)), trace, model)
        return bool(await self._connections.command(*call))

    async def open(
        self,
        trace: str,
        engine: str,
        attempt: int = 1,
        limits: Limits = DEFAULTS,
        *,
        model: str = "",
        mark: NonceMark | None = None,
    ) -> Opened:
        """Begin to run a trace on `engine` as this attempt. From now on, orders for the trace go to that engine.

        The record gets the engine's limits on changes of live parameters. The call may be repeated after a lost reply.
        With `model`, the trace must be of this model. `mark` marks the nonce of a signed submission.

        Raises:
            TraceElsewhere: the trace is of another model.
            TraceOfAnother: another key than that of `mark` has submitted the trace.
            TraceEnded: the trace has ended.
            Overtaken: another engine has begun this attempt, or a later attempt has begun, and the trace has not ended.
            Replayed: an attempt as late has had the submission, and the record has no attempt as late.
            Malformed: the record cannot be read.
        """
        keys = self._keys
        reply = await self._connections.command(
            *_OPEN(
                [keys.record(trace), keys.events(trace), keys.changes(trace)]
                + ([] if mark is None else [keys.nonce(trace, mark.key, mark.nonce)]),
                *(engine, REMEMBER_S, attempt, self._retention_s, limits.steers_waiting, limits.steers_per_s, model),
                *("", "") if mark is None else (mark.word, mark.key),
            )
        )
        if isinstance(reply, bytes):
            raise _not_opened(text_of(reply), trace, attempt)
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
        """The command by which an engine claims again that it runs this attempt, for a Redis that may have lost that.

        The command also writes the engine's live parameters and their version, and who has paused the trace (None if
        nobody has) after `pauses` pauses and resumptions. A record with a greater version or count keeps its own.
        `closed` says that the trace accepts no more changes. The command has no effect if another engine or a later
        attempt has begun. Redis may execute it more than once.
        """
        return _CLAIM(
            (self._keys.record(trace), self._keys.events(trace)),
            *(attempt, engine, "closed" if closed else "running", version, REMEMBER_S),
            # A pause without a name is a pause, too.
            "" if paused is None else paused or "somebody",
            pauses,
            *(part for pair in live.items() for part in pair),
        )

    async def leave(self, trace: str, engine: str, attempt: int) -> None:
        """Note that `engine`, which has begun this attempt, runs the trace no longer. No effect for another attempt.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        await self._connections.command(*_LEAVE((self._keys.record(trace),), engine, attempt))

    async def close(self, trace: str, attempt: int) -> list[bytes]:
        """Refuse further changes of a trace that is about to end. No effect if this is not the last attempt.

        Returns the changes that no event has reported yet, encoded, in order.
        """
        call = _CLOSE((self._keys.record(trace), self._keys.changes(trace)), attempt)
        return list(await self._connections.command(*call))

    async def end(self, trace: str, status: Status, failure: Failure) -> bool:
        """End a trace at once, even if an engine runs it. Returns False if the trace had ended before."""
        keys = self._keys
        if not is_encodable(trace):
            return False
        head, tail = _final(status, failure)
        call = _END(
            (keys.record(trace), keys.events(trace)),
            *(trace, self._base(keys.tag(trace)), schema_text(), head, tail, self._retention_s, status, failure.type),
        )
        return bool(await self._connections.command(*call))

    async def publish_waiting(self, attempts: Sequence[tuple[str, int]], reason: str) -> int:
        """Publish for each trace and attempt that the attempt is over and that the trace waits for another engine.

        Returns the number of published events. Redis publishes none for a trace that has ended, that a later attempt
        runs, or whose attempt has not published any event.

        Raises:
            BusUnavailable: Redis does not answer; some events may have been published.
        """
        keys, calls = self._keys, []
        for trace, attempt in attempts:
            if is_encodable(trace):
                event = encode(Waiting(attempt=attempt, seq=_ATTEMPT, reason=reason, time=time.time()))
                head, _, tail = event.partition(_MARK)
                names = (keys.record(trace), keys.events(trace))
                calls.append(_WAIT(names, attempt, schema_text(), head + _MARK[:1], tail))
        published = await self._connections.commands(*calls) if calls else []
        return sum(map(int, published))

    # --- operations by clients ----------------------------------------------------------------------------------------

    async def live(self, trace: str) -> LiveState:
        """A trace's live parameters as its record has them now.

        Raises:
            TraceMissing: there is no such trace.
            Malformed: the record cannot be read.
        """
        check_name(trace)
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
        """Change live parameters: all of `values` together, or none. Returns their new version.

        With `if_version`, the change is refused unless the parameters have that version. If the connection breaks, the
        command is sent again and takes effect once.

        Raises:
            SteerRefused: a value does not fit its declaration, or the version is another, or too many changes wait.
            TraceEnded: the trace has ended or is about to end.
            TraceMissing: there is no such trace.
            BusUnavailable: Redis does not answer; the change may have been accepted.
        """
        check_name(trace)
        keys = self._keys
        author, packed = msgspec.msgpack.encode(by), pack_live({name: one.packed for name, one in values.items()})
        reply = await self._connections.command(
            *_STEER(
                (
                    *(keys.record(trace), keys.events(trace), keys.changes(trace), keys.operations(trace)),
                    keys.control(keys.tag(trace), ""),
                ),
                *(trace, keys.control(keys.tag(trace), ""), _operation(), author),
                *("" if if_version is None else if_version, packed, REMEMBER_S, CONTROL_S),
                self._proofs.order("steer", trace, change_content(author, packed)),
                *_flat(values),
            )
        )
        match text_of(reply[0]):
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
            case reason:
                raise _steer_refusal(reason, [text_of(one) for one in reply[1:]], values)

    async def cancel(self, trace: str, *, by: str, reason: str, force: bool = False) -> tuple[str, str]:
        """End a trace as `cancelled`, or ask its engine to.

        Returns the engine that was asked and `""` if an engine runs the trace. Otherwise the trace has ended now, and
        the call returns `""` and the trace's model, in whose queue its entry may still wait.

        With `force`, the trace ends now even if an engine runs it. A second call has no further effect. If the
        connection breaks, the command is sent again and returns the same.

        Raises:
            TraceEnded: the trace had ended before.
            TraceMissing: there is no such trace.
        """
        check_name(trace)
        keys = self._keys
        tag = keys.tag(trace)
        head, tail = _final("cancelled", cancellation(by, reason))
        reply = await self._connections.command(
            *_CANCEL(
                (keys.record(trace), keys.events(trace), keys.operations(trace), keys.control(tag, "")),
                *(trace, self._base(tag), keys.control(tag, ""), by, reason, schema_text(), head, tail),
                *(self._retention_s, "1" if force else "", CONTROL_S, _operation(), REMEMBER_S),
                self._proofs.order("cancel", trace, cancel_content(by, reason)),
            )
        )
        match text_of(reply[0]):
            case "unknown":
                raise TraceMissing(f"no trace {trace!r}")
            case "ended":
                raise TraceEnded(f"trace {trace} has ended")
            case "asked":
                return text_of(reply[1]), ""
            case _:
                return "", text_of(reply[1])

    async def pause(
        self,
        trace: str,
        *,
        by: str,
        resume: bool = False,
        within_s: float | None = None,
        then: str = "",
        of: str = "",
    ) -> bool:
        """Pause a trace, or, with `resume`, let it go on. Returns False if it was in that state already.

        If the connection breaks, the command is sent again and takes effect once.

        Args:
            trace: its id.
            by: the author.
            resume: whether the trace goes on.
            within_s: after how many seconds the engine ends the pause, by `then`: `resume` or `cancel`. The same author
                may move the end, and a pause without an end replaces one with an end.
            then: what the engine does at the end.
            of: with `resume`, whose pause ends; a pause of another author goes on. `""`: anybody's.

        Raises:
            TraceEnded: the trace has ended or is about to end.
            TraceMissing: there is no such trace.
        """
        check_name(trace)
        keys = self._keys
        names = keys.record(trace), keys.events(trace), keys.operations(trace)
        action: Literal["pause", "resume"] = "resume" if resume else "pause"
        within_s = None if within_s is None else float(within_s)
        reply = await self._connections.command(
            *_PAUSE(
                (*names, keys.control(keys.tag(trace), "")),
                *(trace, keys.control(keys.tag(trace), ""), action, by, CONTROL_S, _operation(), REMEMBER_S),
                self._proofs.order(action, trace, pause_content(by, within_s, then)),
                *("" if within_s is None else repr(within_s), then, of),
            )
        )
        match text_of(reply):
            case "unknown":
                raise TraceMissing(f"no trace {trace!r}")
            case "ended":
                raise TraceEnded(f"trace {trace} has ended")
            case answer:
                return answer == "asked"

    async def restore(
        self, trace: str, version: int, refused: Mapping[str, bytes], values: Mapping[str, tuple[bytes, bytes]]
    ) -> None:
        """Undo a change of live parameters that the trace's engine has refused.

        Args:
            trace: its id.
            version: of the change.
            refused: the packed values of the change, by name.
            values: for each of the names, the packed value that holds, and the signed change that has set it, or `b""`.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        keys = self._keys
        flat = [part for name, value in refused.items() if name in values for part in (name, value, *values[name])]
        await self._connections.command(*_RESTORE((keys.record(trace), keys.changes(trace)), version, *flat))

    async def sweep(self, tags: Sequence[str]) -> list[tuple[str, str]]:
        """End the traces of these hash tags that are past their deadline and that no engine runs.

        Returns each such trace with its model, in whose queue its entry may still wait.
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
            (text_of(trace), text_of(model))
            for reply in replies
            for trace, model in zip(reply[::2], reply[1::2], strict=True)
        ]


def unpause_command(keys: Keys, trace: str, number: int, *, cancels: bool = False) -> tuple[Any, ...]:
    """The command by which a trace's engine ends the pause of this number, whose time is over.

    With `cancels`, Redis accepts no further order for the trace, which the engine then cancels. The reply is a number
    greater than 0; or 0 if another order came since. Redis may execute the command more than once.
    """
    return _UNPAUSE((keys.record(trace),), number, "1" if cancels else "")


def _not_opened(reply: str, trace: str, attempt: int) -> BusError:
    """The error for the reply of the script that opens a trace."""
    match reply:
        case "ended":
            return TraceEnded(f"trace {trace} has ended")
        case "elsewhere":
            return TraceElsewhere(f"trace {trace} was submitted to another model")
        case "another's":
            return TraceOfAnother(f"trace {trace} was submitted with another key")
        case "replayed":
            return Replayed(f"the submission of trace {trace} was replayed: an engine has taken it before")
        case _:
            return Overtaken(
                f"another engine has begun attempt {attempt} of trace {trace}, or a later attempt has begun"
            )


def _steer_refusal(reason: str, told: Sequence[str], values: Mapping[str, LiveValue]) -> SteerRefused:
    """The error for the reply of the script that changes live parameters; `told` is the reply behind its reason."""
    match reason:
        case "undeclared":
            name, declared = told
            message = f"no live parameter {name!r} was declared at submission (declared: {declared or 'none'})"
            return SteerRefused("undeclared", message, name=name, declared=declared)
        case "form":
            name, declared = told
            message = f"it was declared as {declared}, got {values[name].form}"
            return SteerRefused("form", message, name=name, declared=declared)
        case "large":
            name, most = told
            message = f"the value takes {len(values[name].packed)} bytes; the limit is {most}"
            return SteerRefused("form", message, name=name, declared=f"a value of at most {most} bytes")
        case _:
            (limit,) = told
            what = "wait for its engine" if limit == "steers-waiting" else "came within this second"
            return SteerRefused("busy", f"as many changes of this trace {what} as may (--limit {limit})")


def _operation() -> str:
    """A random id for an operation. A script ignores a second operation of the same id."""
    return secrets.token_hex(8)


def _opened(now: int, flat: Sequence[bytes], changes: Sequence[bytes]) -> Opened:
    record: dict[bytes, bytes] = dict(zip(flat[::2], flat[1::2], strict=True))
    due, pause_due = record.get(b"t"), record.get(b"zt")
    cancelled = record.get(b"x")
    live = pack_live(_live(record))
    unpack_live(live)
    return Opened(
        attempt=integer(record[b"a"], 1),
        now=integer(now) / 1000,
        left_s=None if due is None else (deadline_ms(due) - integer(now)) / 1000,
        version=integer(record.get(b"v", 0)),
        live=live,
        changes=list(changes),
        cancelled=None if cancelled is None else (text_of(record.get(b"xb", b"")), text_of(cancelled)),
        paused=None if b"z" not in record else text_of(record[b"z"]),
        pauses=integer(record.get(b"zn", 0)),
        pause_left_s=None if pause_due is None else (deadline_ms(pause_due) - integer(now)) / 1000,
        pause_within_s=None if b"zw" not in record else float(record[b"zw"]),
        pause_then=text_of(record.get(b"zo", b"")),
        cancel_proof=record.get(b"xg", b""),
        pause_proof=record.get(b"zg", b""),
        live_proofs={name[2:].decode(): change for name, change in record.items() if name.startswith(b"g:")},
    )


def _live_state(record: Mapping[bytes, bytes]) -> LiveState:
    values = {name: unpack(packed) for name, packed in _live(record).items()}
    return LiveState(integer(record.get(b"v", 0)), values)


def cancellation(by: str, reason: str) -> Failure:
    """The error of a cancelled trace."""
    message = f"cancelled by {by or 'somebody'}" + (f": {reason}" if reason else "")
    return Failure(type="Cancelled", message=message, by=by, reason=reason)


def _final(status: Status, failure: Failure) -> tuple[bytes, bytes]:
    """An encoded final event: the bytes before its attempt number, and the bytes after."""
    event = FinalEvent(attempt=_ATTEMPT, seq=0, status=status, error=failure, time=time.time())
    head, mark, tail = encode(event).partition(_MARK)
    assert mark
    return head + mark[:1], tail


def _flat(values: Mapping[str, LiveValue]) -> list[Any]:
    return [part for name, value in values.items() for part in (name, value.form, value.packed)]


def _live(record: Mapping[bytes, bytes]) -> dict[str, bytes]:
    """The live parameters in a record, packed, by name."""
    return {field[2:].decode(): packed for field, packed in record.items() if field.startswith(b"l:")}
