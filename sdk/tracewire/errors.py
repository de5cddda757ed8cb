"""Every error that the SDK raises, in the caller's terms.

An error about a submission names the *field* at fault as the caller wrote it (`"prompt"`, `"sampling.temperature"`,
`"variables.direction"`), whether it was found before the submission or by the engine. An error in a block names the
user's own file and line. All of them are [`TracewireError`][]s.

Each error derives from exactly one of seven bases, which say what a caller can do: `NotFoundError`,
`InvalidRequestError`, `RetryableError`, `PermissionDeniedError`, `ConflictError`, `ClosedError` and `IntegrityError`.
`ConnectError`, `SteerRejected`, `EditRejected` and `BrokenStream` are groups: they say what failed. `TraceFailed`, in
`traces/failures.py`, is the group of traces that ran; of its members only `EngineLost` and `BusFilled` can be retried.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from tracewire_bus.wire.messages import Final

__all__ = [
    "AlreadyEntered",
    "AmbiguousResult",
    "BlockError",
    "BlockOnly",
    "BrokenStream",
    "BusFull",
    "BusRefused",
    "BusUnavailable",
    "ClientClosed",
    "ClientTooOld",
    "ClosedError",
    "CodeRefused",
    "ConflictError",
    "ConnectError",
    "EditConflict",
    "EditPending",
    "EditRejected",
    "EngineTooOld",
    "EntryConflict",
    "EventsLost",
    "HarvestConflict",
    "HarvestMissing",
    "IntegrityError",
    "InvalidChange",
    "InvalidDataset",
    "InvalidEdit",
    "InvalidEntry",
    "InvalidKey",
    "InvalidRecording",
    "InvalidRequestError",
    "InvalidRules",
    "InvalidUrl",
    "LibraryMissing",
    "MalformedEvent",
    "MalformedRecord",
    "NotAnArray",
    "NotConnected",
    "NotEnded",
    "NotFoundError",
    "NotLoaded",
    "OutputsRead",
    "Overloaded",
    "PermissionDeniedError",
    "PrivateRedisError",
    "RetryableError",
    "SaveMissing",
    "ShardDamaged",
    "StateMismatch",
    "SteerRejected",
    "StoreFull",
    "StoreRefused",
    "StoreUnavailable",
    "TextChanged",
    "TokenizerUnavailable",
    "TooManyChanges",
    "TooManyEdits",
    "TraceClosed",
    "TraceEnded",
    "TraceForgotten",
    "TraceIdTaken",
    "TraceRejected",
    "TracewireError",
    "UnexpectedReply",
    "UnknownDeadLetter",
    "UnknownEdit",
    "UnknownEngine",
    "UnknownEntry",
    "UnknownModel",
    "UnknownModulePath",
    "UnknownOption",
    "UnknownPosition",
    "UnknownTrace",
    "UnknownWatchGroup",
    "UntransportableVariable",
    "UnverifiedFinal",
    "ValueMissing",
    "VersionConflict",
    "WrongEventLoop",
]

#: The kinds of values that a variable, or a live parameter, can have.
TRANSPORTABLE = (
    "numbers, strings, bytes, None, NumPy arrays, torch tensors, and lists, tuples, dicts and sets of them; functions, "
    "classes and networks travel as source, with what they hold, and installed packages by name"
)


class TracewireError(Exception):
    """Base of all errors of the SDK."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, vars(self))


def _restored(cls: type[TracewireError], arguments: tuple[Any, ...], state: dict[str, Any]) -> TracewireError:
    """A copy of an error, made without its class's own arguments."""
    error = cls.__new__(cls, *arguments)
    error.args = arguments
    error.__dict__.update(state)
    return error


# --- what a caller can do about it ------------------------------------------------------------------------------------


class NotFoundError(TracewireError, LookupError):
    """The request names something that does not exist. The caller names another one, or waits until this one exists."""


class InvalidRequestError(TracewireError, ValueError):
    """The request can never be executed as it is. The caller changes it: the message says what was expected."""


class RetryableError(TracewireError):
    """The request was not executed, or the client cannot know whether it was. The caller can repeat it later.

    Attributes:
        retry_after: seconds to wait before another attempt. `Overloaded` computes it from the queue. The other classes
            have one pause each, since the client cannot know when a Redis, an engine or a store is back.
    """

    retry_after: float = 1.0


class PermissionDeniedError(TracewireError, PermissionError):
    """Redis does not allow this user the request. An operator has to allow it."""


class ConflictError(TracewireError):
    """The request was made for another state than the present one: another version, an id in use, a trace that ended.
    The caller reads the present state and decides again.
    """


class ClosedError(TracewireError):
    """The object was closed. The caller makes another one."""


class IntegrityError(TracewireError):
    """Redis holds something else than an engine or a client wrote. Another attempt reads the same. An operator has to
    find out which other program writes to this Redis.
    """


# --- the client and its Redis -----------------------------------------------------------------------------------------


class ConnectError(TracewireError):
    """The client cannot use its Redis. Each subclass has one cause."""


class InvalidUrl(ConnectError, InvalidRequestError):
    """The URL, the prefix or an option of them names no Redis that the client can use, or no URL was given."""


class InvalidKey(ConnectError, InvalidRequestError):
    """A key file cannot be read, or the public key of an engine is malformed."""


class NotConnected(ConnectError, InvalidRequestError, RuntimeError):
    """The client is not connected yet, or a model's handle has no client."""


class PrivateRedisError(ConnectError, NotFoundError):
    """`embedded://` could not start a private Redis: none is installed, or it ended as it started."""


class BusUnavailable(ConnectError, RetryableError, ConnectionError):
    """Redis has not answered for the client's `retry_timeout`.

    Redis may have executed the request, which can be sent again. The client waits for Redis again for `retry_timeout`.
    """


class BusRefused(ConnectError, PermissionDeniedError):
    """Redis refuses these credentials, or does not allow its user the request. Another attempt would fail, too."""


class UnexpectedReply(ConnectError, IntegrityError):
    """Redis answered with an error that no Redis of a supported version gives: an old server, a proxy, or another
    program's values under Tracewire's keys.
    """


class MalformedRecord(ConnectError, IntegrityError):
    """A record in Redis cannot be read. The message names its key."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message} (find out which other program writes there; this record is lost)")


class ClientClosed(ConnectError, ClosedError):
    """The client was closed."""


class WrongEventLoop(InvalidRequestError, RuntimeError):
    """The call was made outside the client's event loop, or where no event loop runs."""


class AlreadyEntered(InvalidRequestError, RuntimeError):
    """A client or a trace was entered a second time. The caller makes another one for each `with`."""


# --- unknown names ----------------------------------------------------------------------------------------------------


class UnknownModel(NotFoundError):
    """No live engine serves a model of this name.

    Attributes:
        model: the name that was asked for.
        available: the names that are served now.
    """

    def __init__(self, model: str, available: Iterable[str], waited: float | None = None) -> None:
        self.model = model
        self.available = sorted(available)
        served = ", ".join(repr(name) for name in self.available)
        message = f"no engine serves the model {model!r}"
        if waited is not None:
            message += f" after {waited:g} s"
        message += f"; served now: {served}" if served else "; no engine is registered at all: start one with "
        message += "" if served else f"`tracewire engine {model}`"
        if waited is None:
            from difflib import get_close_matches

            near = get_close_matches(model, self.available, 1)
            message += f"; did you mean {near[0]!r}?" if near else ""
            message += " (an engine is registered once its model has loaded: `tracewire models` lists them)"
        super().__init__(message)


class UnknownEngine(NotFoundError):
    """No live engine has this name.

    Attributes:
        engine: the name that was asked for.
        available: the names of the live engines.
    """

    def __init__(self, engine: str, available: Iterable[str]) -> None:
        self.engine = engine
        self.available = sorted(available)
        live = f"live now: {', '.join(self.available)}" if self.available else "no engine is registered at all"
        live += " (`tracewire engines` lists them)"
        super().__init__(f"no engine is called {engine!r}; {live}")


class EngineTooOld(ConflictError):
    """The engine's version is too old for the request. `engine` is its name, `schema` the version that it writes."""

    def __init__(self, engine: str, schema: str) -> None:
        self.engine = engine
        self.schema = schema
        super().__init__(
            f"engine {engine} writes schema {schema}, and cannot be asked to drain before 1.1: SIGTERM drains it"
        )


class Overloaded(RetryableError):
    """Too many submissions wait for the model. This one was not queued, and can be started again.

    Attributes:
        model: the model's name.
        waiting: how many submissions wait.
        limit: how many may wait. A client with few waiting submissions of its own is refused only at twice as many.
        retry_after: seconds until there is room again (0.1 to 60). Redis computes it from the rate at which
            engines took submissions.
    """

    def __init__(self, model: str, waiting: int, limit: int, retry_after: float) -> None:
        self.model = model
        self.waiting = waiting
        self.limit = limit
        self.retry_after = retry_after
        super().__init__(
            f"{waiting} submissions wait for the model {model!r}, the limit is {limit}; "
            f"there may be room in {retry_after:.3g} s: start it again then"
        )


class BusFull(RetryableError):
    """Redis has too little memory left for the request, such as another trace. The caller can try again later.

    Traces that end and expire make room (`tracewire engine --retention`), and so does more `maxmemory`.
    """

    retry_after = 5.0


class UnknownTrace(NotFoundError):
    """No trace of this id was submitted, or it ended so long ago that its events have expired."""

    def __init__(self, trace_id: str) -> None:
        self.trace_id = trace_id
        super().__init__(
            f"no trace {trace_id!r}: it was never submitted here, or its events have expired (check the id, and that "
            "its submitter uses the same Redis and prefix)"
        )


class UnknownEntry(NotFoundError):
    """The library has no entry of this name or version, or the entry was removed. `name` is the name asked for."""

    def __init__(self, name: str, why: str = "") -> None:
        self.name = name
        super().__init__(f"the library has no entry {name!r}{f': {why}' if why else ''} (`tracewire library list`)")


class InvalidEntry(InvalidRequestError):
    """An entry of the library cannot be put, or a name is none. `field` names the part at fault.

    Attributes:
        name: the entry's name.
        field: the part at fault: `"arrays"`, `"kind"`, `"at"`, ...
        message: what was observed, and what was expected.
    """

    def __init__(self, name: str, field: str, message: str) -> None:
        self.name = name
        self.field = field
        self.message = message
        super().__init__(f"entry {name!r}: {field}: {message}")


class EntryConflict(ConflictError):
    """The newest version of the entry is not the expected one, or the library has room for no more entries.

    Attributes:
        name: the entry's name.
        version: the newest version; 0 if there is none.
    """

    def __init__(self, name: str, message: str, version: int) -> None:
        self.name = name
        self.version = version
        super().__init__(f"entry {name!r} was not put: {message}")


class UnknownDeadLetter(NotFoundError):
    """There is no dead letter of this id: it was resubmitted or dropped, or newer ones took its place."""

    def __init__(self, id_: str) -> None:
        self.id = id_
        super().__init__(
            f"no dead letter {id_!r}: it was resubmitted or dropped, or newer ones took its place "
            "(`tracewire dead list` shows those there are)"
        )


class TraceRejected(InvalidRequestError):
    """A trace never ran: the SDK or the engine refused its submission.

    Attributes:
        field: the part of the submission at fault, as the caller wrote it.
        message: what was observed, and what was expected.
        type: class name of the underlying error, when the engine had one.
        filename, line, source: where in the block, when the fault lies there.
        trace_id: the trace's id, when it had one already.
    """

    def __init__(
        self,
        field: str,
        message: str,
        *,
        type: str | None = None,
        filename: str | None = None,
        line: int | None = None,
        source: str | None = None,
        trace_id: str | None = None,
    ) -> None:
        self.field = field
        self.message = message
        self.type = type
        self.filename = filename
        self.line = line
        self.source = source
        self.trace_id = trace_id
        where = ""
        if line is not None:
            where = f" ({filename}:{line})" if filename else f" (line {line})"
        super().__init__(f"{field}: {message}{where}")


class UnknownOption(TraceRejected, TypeError):
    """A keyword argument of a trace or a prompt is neither an option nor a sampling param. Nothing was sent.

    Attributes:
        name: the keyword.
        nearest: the nearest keyword that exists, or None.
    """

    def __init__(self, field: str, name: str, nearest: str | None) -> None:
        self.name = name
        self.nearest = nearest
        hint = f"; did you mean {nearest!r}?" if nearest is not None else ""
        also = "" if nearest is not None else " (extra_sampling={...} sends what a newer vLLM may know)"
        super().__init__(field, f"{name!r} is neither an option nor a sampling param{hint}{also}")


class TraceIdTaken(ConflictError):
    """Another trace has this id: on another model, or one that has ended. `trace_id` is the id."""

    def __init__(self, trace_id: str, message: str) -> None:
        self.trace_id = trace_id
        super().__init__(f"trace_id: {message}: take another one")


class BlockError(TraceRejected):
    """The source of a block, or of a function that it calls, cannot travel. `filename` and `line` say where.

    Raised when the block is decorated (statements that no block can have, a source that cannot be read) or when it is
    submitted (names that are not defined).
    """

    def __init__(self, message: str, *, filename: str | None = None, line: int | None = None) -> None:
        super().__init__("block", message, type="BlockError", filename=filename, line=line)
        where = ":".join(str(part) for part in (filename, line) if part is not None)
        self.args = (f"{where}: {message}" if where else message,)


class UnknownModulePath(TraceRejected):
    """A block names a module that the model does not have.

    Attributes:
        path: the path as the block writes it, without the model's own name.
        nearest: the nearest path that exists, or None.
    """

    def __init__(
        self,
        path: str,
        nearest: str | None,
        *,
        message: str | None = None,
        filename: str | None = None,
        line: int | None = None,
        source: str | None = None,
    ) -> None:
        self.path = path
        self.nearest = nearest
        if message is None:
            message = f"the model has no {path!r}"
            if nearest is not None:
                message += f"; the nearest path that exists is {nearest!r}"
        super().__init__("block", message, type="UnknownModulePath", filename=filename, line=line, source=source)


class CodeRefused(TraceRejected):
    """The engine does not run this block's code (`tracewire engine --code`). The message names the option and why."""

    def __init__(self, message: str, *, field: str = "block") -> None:
        super().__init__(field, message, type="CodeRefused")


class UntransportableVariable(TraceRejected):
    """A variable of a block, a live parameter or a shared value cannot travel.

    Attributes:
        variable: its name.
        reason: why it cannot travel.
    """

    def __init__(
        self,
        variable: str,
        reason: str,
        *,
        field: str | None = None,
        filename: str | None = None,
        line: int | None = None,
    ) -> None:
        self.variable = variable
        self.reason = reason
        super().__init__(
            field or f"variables.{variable}",
            # The reason for a live parameter or a shared value says itself what was expected.
            reason if field else f"{reason}. What can travel: {TRANSPORTABLE}",
            type="UntransportableVariable",
            filename=filename,
            line=line,
        )


class TraceEnded(ConflictError):
    """The trace has ended, or is about to: nothing about it can be changed."""

    def __init__(self, trace_id: str) -> None:
        self.trace_id = trace_id
        super().__init__(f"trace {trace_id} has ended: nothing about it can be changed; submit another one")


class SteerRejected(TracewireError):
    """A change of live parameters was refused; none of its values took effect. Each subclass has one cause.

    Attributes:
        trace_id: the trace's id.
        field: the parameter at fault as the caller wrote it (`"live.alpha"`), or `"live"`.
        message: what was observed, and what was expected.
        reason: `value` (no live parameter can have it), `form` (not of the declared type or shape), `undeclared`
            (all three an `InvalidChange`), `version` (`VersionConflict`) or `busy` (`TooManyChanges`).
    """

    def __init__(self, trace_id: str, field: str, message: str, *, reason: str = "value") -> None:
        self.trace_id = trace_id
        self.field = field
        self.message = message
        self.reason = reason
        super().__init__(f"{field}: {message}")


class InvalidChange(SteerRejected, InvalidRequestError):
    """A live parameter was not declared, or cannot have the value: `field` says which, `reason` why."""


class TooManyChanges(SteerRejected, RetryableError):
    """Too many changes of the trace's live parameters wait for its engine, which takes them between two steps."""

    retry_after = 0.1

    def __init__(self, trace_id: str, message: str) -> None:
        super().__init__(trace_id, "live", message, reason="busy")


class VersionConflict(SteerRejected, ConflictError):
    """The live parameters have another version than `if_version=` says. `version` is the version that they have."""

    def __init__(self, trace_id: str, message: str, version: int) -> None:
        super().__init__(
            trace_id, "if_version", f"{message} (get_live() and `tracewire state` read them)", reason="version"
        )
        self.version = version


class EditRejected(TracewireError):
    """An edit was not installed: the SDK or an engine refused it. An earlier edit of this name is still installed. Each
    subclass has one cause.

    Attributes:
        name: the edit's name.
        field: the part at fault as the caller wrote it.
        message: what was observed, and what was expected.
    """

    def __init__(self, name: str, field: str, message: str) -> None:
        self.name = name
        self.field = field
        self.message = message
        super().__init__(f"edit {name!r}: {field}: {message}")


class InvalidEdit(EditRejected, InvalidRequestError):
    """The edit cannot run as it is: `field` says which part, `message` why."""


class TooManyEdits(EditRejected, ConflictError):
    """The model has as many edits as it can have."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(name, "name", message)


class EditConflict(EditRejected, ConflictError):
    """Another version of the edit is installed than `replacing=` says. `version` is the installed one, 0 for none."""

    def __init__(self, name: str, message: str, version: int) -> None:
        super().__init__(name, "replacing", f"{message} (edits.get() reads it)")
        self.version = version


class EditPending(RetryableError, TimeoutError):
    """An edit was installed or removed, but some live engines have not confirmed the change in time.

    The engines apply the change when they next read the edits; a repeated call waits for them again.

    Attributes:
        name: the edit's name.
        engines: names of the engines that have not confirmed.
    """

    def __init__(self, name: str, engines: Iterable[str], waited: float) -> None:
        self.name = name
        self.engines = sorted(engines)
        super().__init__(
            f"edit {name!r}: after {waited:g} s, not yet confirmed by {', '.join(self.engines)}: the change is stored "
            "and they will apply it, and a repeated call waits for them again"
        )


class UnknownWatchGroup(NotFoundError):
    """The group of a watch was removed while the watch read. A watch of the same name makes the group anew."""


class UnknownEdit(NotFoundError):
    """No edit of this name is installed on the model, or none of this version."""

    def __init__(self, name: str, message: str) -> None:
        self.name = name
        super().__init__(f"{message} (`tracewire edits list MODEL` shows those there are)")


class StateMismatch(IntegrityError):
    """The state that the client folded differs from the engine's digests. `names` lists the saves that differ."""

    def __init__(self, message: str, names: Iterable[str] = ()) -> None:
        self.names = list(names)
        super().__init__(f"{message} (a client or an engine has a defect: run the trace again, and report it)")


class BrokenStream(TracewireError):
    """The rest of a trace, or of an edit's records, cannot be read. Each subclass has one cause."""


class MalformedEvent(BrokenStream, IntegrityError):
    """An event cannot be decoded, or does not continue the events before it."""

    def __init__(self, message: str) -> None:
        super().__init__(
            f"{message} (another program wrote to the stream, or an engine has a defect: its log has more)"
        )


class UnverifiedFinal(BrokenStream, IntegrityError):
    """A trace's final is signed by none of the engines that the client trusts (`engine_keys`).

    Another program may have written it. Redis itself ends a trace that no engine runs, and signs nothing.

    Attributes:
        trace_id: the trace's id.
        final: the final, as it is on the stream.
    """

    def __init__(self, trace_id: str, final: Final) -> None:
        self.trace_id = trace_id
        self.final = final
        super().__init__(
            f"trace {trace_id} ended as {final.status!r} by a final that none of the client's engine_keys has signed: "
            "another program wrote it, or no engine ran the trace at its end"
        )


class ClientTooOld(BrokenStream, ConflictError):
    """An engine wrote the event in a newer schema than this client reads. The message names both."""


class EventsLost(BrokenStream, NotFoundError):
    """The next events were removed, and there is no snapshot of the state after them.

    An engine that trims a stream leaves a snapshot, so this stream was trimmed or removed by hand. Reading on from
    `until` (`subscribe(trace, since=...)`) gives the events that are left.

    Attributes:
        trace_id: the trace's id.
        since: id of the last event that was read, or `"start"`.
        until: id of the first event that is left.
    """

    def __init__(self, trace_id: str, since: str, until: str) -> None:
        self.trace_id = trace_id
        self.since = since
        self.until = until
        super().__init__(
            f"trace {trace_id}: the events after {since!r} and before {until} were removed, and there is no snapshot "
            f"of the state after them: the stream was trimmed by hand "
            f"(client.subscribe({trace_id!r}, since={until!r}) reads what is left)"
        )


class TraceForgotten(BrokenStream, NotFoundError):
    """A trace was removed with all its events while a client read it. The trace had ended. Then its retention was over
    (`tracewire engine --retention`), or newer traces took its room (`--retain-traces`, `--retain-total-bytes`).

    Attributes:
        trace_id: the trace's id.
        since: id of the last event that was read, or `"start"`.
    """

    def __init__(self, trace_id: str, since: str) -> None:
        self.trace_id = trace_id
        self.since = since
        super().__init__(
            f"trace {trace_id} was removed while it was read, after event {since!r}: it had ended, and its retention "
            f"was over or newer traces needed the room (`tracewire engine --retention` keeps traces longer)"
        )


class ValueMissing(NotFoundError):
    """A large value that a trace refers to cannot be loaded: it has expired with its trace, or parts of it are missing.

    Attributes:
        trace_id: the trace's id.
        name: the saved name that the value was first saved under; empty for all that an event saved.
    """

    def __init__(self, trace_id: str, name: str, reason: str, *, what: str = "") -> None:
        self.trace_id = trace_id
        self.name = name
        super().__init__(
            f"{what or f'the value saved as {name!r} by trace {trace_id}'} cannot be loaded: {reason} "
            "(load it before its trace expires; `tracewire engine --retention` keeps both longer)"
        )

    @classmethod
    def of_event(cls, trace_id: str, event_id: str, reason: str) -> Self:
        """The error for all that one event saved."""
        return cls(trace_id, "", reason, what=f"the saves of event {event_id} of trace {trace_id}")


class TokenizerUnavailable(NotFoundError):
    """`model.tokenizer` cannot be loaded: transformers or the tokenizer's files are missing on this machine."""


class BlockOnly(InvalidRequestError, AttributeError):
    """The attribute or function exists only inside a block, which the engine runs."""


class InvalidRecording(InvalidRequestError):
    """A file is no recording of a trace, or is damaged, or a recording cannot be run again. `path` names the file."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


class InvalidRules(InvalidRequestError):
    """The rules of a guard are wrong.

    Attributes:
        rule: the name of the rule at fault; `""` if it is not about one rule.
        field: the field at fault, as the rules have it; `""` if they cannot be read at all.
    """

    def __init__(self, rule: str, field: str, message: str) -> None:
        where = f"rule {rule!r}, {field}: " if rule else f"{field}: " if field else ""
        super().__init__(f"{where}{message}")
        self.rule = rule
        self.field = field


class UnknownPosition(InvalidRequestError):
    """A place in a trace is none of `"start"`, `"now"`, `"recent"` and ids of events. `since` is the given value."""

    def __init__(self, since: str) -> None:
        self.since = since
        shown = since if len(since) <= 60 else since[:57] + "..."
        super().__init__(f"since: expected 'start', 'now', 'recent' or an event's id '<attempt>-<seq>', not {shown!r}")


class SaveMissing(NotFoundError, KeyError):
    """The trace has no save of this name. The message has the reason if the engine gave one.

    Attributes:
        trace_id: the trace's id.
        name: the name that was asked for.
        reason: why the engine could not send the value that was saved; `""` if none was saved.
    """

    def __init__(self, trace_id: str, name: Any, saved: Iterable[str], reason: str, ended: bool) -> None:
        self.trace_id = trace_id
        self.name = name
        self.reason = reason
        names = sorted(saved)
        if reason:
            message = f"what trace {trace_id} saved as {name!r} could not be sent: {reason}"
        else:
            from difflib import get_close_matches

            near = get_close_matches(str(name), names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            held = ", ".join(names) or "nothing"
            so_far = "" if ended else " so far"
            message = f"trace {trace_id} has saved nothing as {name!r}{so_far} (it has {held}){hint}"
        super().__init__(message)

    def __str__(self) -> str:
        # A KeyError shows its message as a key.
        return str(self.args[0])


class TraceClosed(ClosedError):
    """This handle of a trace was closed before its end was read. The trace itself can still be read by its id."""


class OutputsRead(InvalidRequestError, RuntimeError):
    """The outputs cannot be iterated over: `result()` has read them already, without an iteration beside it."""


class NotEnded(InvalidRequestError, RuntimeError):
    """The caller asked for the saves of a `with model.trace(...)` before the trace's end was read."""


class NotLoaded(InvalidRequestError, RuntimeError):
    """A value cannot be converted: it refers to a large array that was not downloaded. `name` is the value's name."""

    def __init__(self, name: str, what: str, nbytes: int) -> None:
        self.name = name
        super().__init__(
            f"{name!r} refers to an array of {nbytes} bytes that was not downloaded: await load() of the same object "
            f"before its {what}()"
        )


class NotAnArray(InvalidRequestError, TypeError):
    """A value cannot be one array: it is text, or a list whose items differ in shape. `name` is the value's name."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        super().__init__(
            f"{name!r} cannot be one array: it is a {type(value).__name__}, or holds one, without one shape and dtype "
            f"(to_numpy({name!r}) converts its parts)"
        )


class LibraryMissing(NotFoundError, ImportError):
    """A conversion needs a library that is not installed. The message names the extra that installs it."""

    def __init__(self, what: str, library: str, extra: str | None = None) -> None:
        super().__init__(f"{what} needs {library}: pip install 'tracewire[{extra or library}]'")


# --- harvests ---------------------------------------------------------------------------------------------------------


class StoreFull(RetryableError, OSError):
    """The place that a harvest is written to has no room left. The shards written before are whole.

    Attributes:
        to: the harvest's URL.
        file: the file that was written, below it.
    """

    retry_after = 60.0

    def __init__(self, to: str, file: str, reason: str) -> None:
        self.to = to
        self.file = file
        super().__init__(
            f"{to} has no room for {file}: {reason} (make room, and run the same harvest again: it goes on)"
        )


class StoreRefused(PermissionDeniedError):
    """The place of a harvest is read-only for this user, or refuses the credentials.

    Attributes:
        to: the harvest's URL.
        file: the file that was to be written or read, below it.
    """

    def __init__(self, to: str, file: str, reason: str) -> None:
        self.to = to
        self.file = file
        where = f"{to} refuses {file}" if file else f"{to} refuses its user"
        super().__init__(f"{where}: {reason} (the credentials are those of the environment, or storage_options)")


class StoreUnavailable(RetryableError, ConnectionError):
    """The place of a harvest does not answer, or has gone. The shards written before are whole if it comes back.

    Attributes:
        to: the harvest's URL.
        file: the file that was to be written or read, below it.
    """

    retry_after = 5.0

    def __init__(self, to: str, file: str, reason: str) -> None:
        self.to = to
        self.file = file
        where = f"{to} cannot be used for {file}" if file else f"{to} cannot be used"
        super().__init__(f"{where}: {reason} (run the same harvest again when it can: it goes on)")


class HarvestMissing(NotFoundError):
    """There is no harvest at this place. `to` is its URL."""

    def __init__(self, to: str) -> None:
        self.to = to
        super().__init__(f"there is no harvest at {to}: it has no harvest.json (check the path)")


class HarvestConflict(ConflictError):
    """The place has a harvest of something else, or another client writes to it now. `to` is its URL."""

    def __init__(self, to: str, message: str) -> None:
        self.to = to
        super().__init__(f"{to}: {message}")


class ShardDamaged(IntegrityError):
    """A file of a harvest is not what was written: it is missing, was cut short or changed. All others can be read.

    Attributes:
        to: the harvest's URL.
        file: the file, below it.
        prompts: how many prompts its shard has.
    """

    def __init__(self, to: str, file: str, prompts: int, reason: str) -> None:
        self.to = to
        self.file = file
        self.prompts = prompts
        if prompts:
            what = f"{file}, of a shard of {prompts} prompt{'s' * (prompts != 1)}, is damaged: {reason}"
            advice = "harvest with repair=True, or --repair, runs these prompts again"
        else:
            what = f"{file} is damaged: {reason}"
            advice = "restore it from a copy: it says which prompts are in which shard"
        super().__init__(f"{to}: {what} ({advice})")


class InvalidDataset(InvalidRequestError):
    """A row of a data set is no prompt, or has no key or one that another row has.

    Attributes:
        row: the row's number, from 0, or None where the data set as a whole is at fault.
    """

    def __init__(self, row: int | None, message: str) -> None:
        self.row = row
        super().__init__(f"row {row} of the data set: {message}" if row is not None else f"the data set: {message}")


class TextChanged(ConflictError):
    """A trace runs again after its engine was lost, and its text differs from the text that `text_stream` has yielded.

    This happens when the live parameters were changed before the loss. Iterating over the trace yields a `Restarted`
    instead.

    Attributes:
        trace_id: the trace's id.
        length: how many characters were yielded.
    """

    def __init__(self, trace_id: str, length: int) -> None:
        self.trace_id = trace_id
        self.length = length
        super().__init__(
            f"trace {trace_id} runs again, and its text differs from the {length} characters that were yielded "
            "(iterate over it to read both attempts)"
        )


class AmbiguousResult(InvalidRequestError, LookupError):
    """The caller asked for the `text`, `token_ids` or `saves` of a trace that has several choices."""
