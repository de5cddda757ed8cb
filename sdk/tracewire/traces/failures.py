"""The errors of traces that ran, each with the result up to the failure."""

from __future__ import annotations

import builtins
from functools import cache
from typing import Any, ClassVar, Final

from tracewire.errors import RetryableError, TracewireError
from tracewire_bus.wire.messages import Failure

from .state import Result

__all__ = [
    "BusFilled",
    "EditFailed",
    "EngineFailed",
    "EngineLost",
    "InterventionError",
    "TraceCancelled",
    "TraceExpired",
    "TraceFailed",
    "trace_failure",
]

#: Builtin exceptions that no error is mixed with. The first two end an iteration, and Python replaces them where a
#: coroutine raises them. A group consists of other exceptions, which the engine does not send.
_NEVER_MIXED = (StopIteration, StopAsyncIteration, BaseExceptionGroup)


class TraceFailed(TracewireError):
    """A trace did not come to its end. Each subclass has one cause.

    Attributes:
        trace_id: its id.
        status: how it ended (`"failed"`, `"cancelled"`, `"expired"`).
        type, message: the error behind it.
        result: what had been generated and saved until then.
    """

    #: Advice for the caller, at the end of the error's text.
    _advice: ClassVar[str] = ""

    def __init__(
        self,
        message: str,
        *,
        trace_id: str,
        status: str = "failed",
        type: str | None = None,
        result: Result | None = None,
    ) -> None:
        self.trace_id = trace_id
        self.status = status
        self.type = type
        self.message = message
        self.result = result
        cause = f"{type}: {message}" if type else message
        text = f"trace {trace_id} {status}" + (f": {cause}" if cause else "") + self._advice
        # Not `super()`: a builtin class among the bases may expect other arguments.
        Exception.__init__(self, text)


class TraceCancelled(TraceFailed):
    """The trace was cancelled: by a client, or by the bus because the trace's submitter has died or left it.

    Attributes:
        by: the author that `cancel(by=...)` named; by default the client's name. `""` from an old engine.
        reason: the reason that `cancel(reason)` gave, or `""`.
    """

    by: str = ""
    reason: str = ""


class TraceExpired(TraceFailed, TimeoutError):
    """The trace's `deadline` passed before it had ended."""

    _advice = " (a longer deadline= gives it more time, and `error.result` has what there was)"


class EngineLost(TraceFailed, RetryableError):
    """The engine that ran the trace died or was shut down, as often as `max_attempts` allows. Another can run it."""

    _advice = " (submit it again: another engine can run it)"


class BusFilled(TraceFailed, RetryableError):
    """Redis had no memory left for the trace's events."""

    _advice = " (submit it again once Redis has room)"

    retry_after = 5.0


class EngineFailed(TraceFailed):
    """The engine could not go on with the trace, because of a defect: `type` and `message` say what the engine found.
    The engine's log has more.
    """

    _advice = " (the engine's log has more)"


class EditFailed(TraceFailed):
    """A standing intervention with `on_error="fail"` raised on the trace. `edit` names it.

    Attributes:
        edit: the edit's name.
        filename, line: where in the edit's own source, where that is known.
    """

    _advice = " (`tracewire edits remove MODEL EDIT` removes the edit)"

    edit: str = ""
    filename: str | None = None
    line: int | None = None


class InterventionError(TraceFailed):
    """A block or a declared intervention raised. `type` and `message` are its exception's; the rest says where in the
    user's own code.

    The error is an instance of the builtin exception class that the block's exception is of, too, so that `except
    ValueError` catches it where the block raised a `ValueError`. An exception of the user's own class counts as its
    nearest builtin base. `StopIteration`, `StopAsyncIteration`, groups and classes other than `Exception`s are left
    out.

    Attributes:
        filename, line, source: the user's line that raised, as its file had it when the block was submitted.
        remote_traceback: the frames that are the user's, as text, or None.
        result: what had been generated and saved until then.
    """

    @classmethod
    def of(cls, failure: Failure, trace_id: str, result: Result | None = None) -> InterventionError:
        """The error for a failure, with the builtin class of the block's exception among its bases."""
        builtin: Any = _builtin(failure)
        kind = _mixed(builtin) if builtin else InterventionError
        return kind(failure, trace_id=trace_id, result=result)

    def __init__(self, failure: Failure, *, trace_id: str, result: Result | None = None) -> None:
        super().__init__(failure.message, trace_id=trace_id, status="failed", type=failure.type, result=result)
        self.filename = failure.filename
        self.line = failure.line
        self.source = failure.source.strip() if failure.source else failure.source
        self.remote_traceback = failure.traceback
        self._failure = failure
        text = f"{failure.type}: {failure.message}"
        if failure.line is not None:
            text += f"\n  at {failure.filename or '<block>'}:{failure.line}"
            if self.source:
                text += f"\n    {self.source}"
        self.args = (text,)
        #: Python prints this attribute of a SyntaxError in place of `str()` of the error.
        self.msg = text

    def __str__(self) -> str:
        # Some builtin classes make a text of other attributes.
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        state = {name: value for name, value in vars(self).items() if name == "__notes__"}
        return InterventionError.of, (self._failure, self.trace_id, self.result), state


def _builtin(failure: Failure) -> type[Exception] | None:
    """The builtin class, besides `Exception`, that a block's exception is of. An old engine says its type only."""
    found = getattr(builtins, failure.builtin or failure.type, None)
    if not isinstance(found, type) or not issubclass(found, Exception) or found is Exception:
        return None
    return None if issubclass(found, _NEVER_MIXED) else found


@cache
def _mixed(builtin: Any) -> type[InterventionError]:
    base = InterventionError
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base, builtin), names)


#: The classes by a trace's status, and those by the type of the failure where the status is `failed`.
_BY_STATUS: Final[dict[str, type[TraceFailed]]] = {"cancelled": TraceCancelled, "expired": TraceExpired}
_BY_TYPE: Final[dict[str, type[TraceFailed]]] = {
    "EngineLost": EngineLost,
    "EngineShutdown": EngineLost,
    "BusFull": BusFilled,
}


def trace_failure(trace_id: str, status: str, failure: Failure | None, result: Result | None) -> TraceFailed:
    """The error for a trace that ended as `status`, which is no good end, because of `failure`."""
    error = failure or Failure(type="", message="")
    field = (error.field or "").partition(".")[0]
    if status == "failed" and error.type != "RanksDiffer" and field in ("block", "interventions", "live"):
        return InterventionError.of(error, trace_id, result)
    kind = EditFailed if field == "edits" else _BY_STATUS.get(status) or _BY_TYPE.get(error.type, EngineFailed)
    made = kind(error.message, trace_id=trace_id, status=status, type=error.type or None, result=result)
    if isinstance(made, TraceCancelled):
        made.by, made.reason = error.by or "", error.reason or ""
    if isinstance(made, EditFailed):
        made.edit, made.filename, made.line = (error.field or "").removeprefix("edits."), error.filename, error.line
    return made
