"""How a trace that ran can fail, with what it had generated and saved until then."""

from __future__ import annotations

import builtins
from functools import cache
from typing import Any

from tracewire.errors import TracewireError
from tracewire_bus.wire.messages import Failure

from .state import Result

__all__ = ["InterventionError", "TraceFailed"]

#: Builtin exceptions that no error is mixed with. The first two end an iteration, and Python replaces them where a
#: coroutine raises them. A group consists of other exceptions, which the engine does not send.
_NEVER_MIXED = (StopIteration, StopAsyncIteration, BaseExceptionGroup)


class TraceFailed(TracewireError):
    """A trace ran and did not come to its end: its engine could not go on, or it was cancelled or expired.

    Attributes:
        trace_id: its id.
        status: how it ended (`"failed"`, `"cancelled"`, `"expired"`).
        type, message: the error behind it.
        result: what had been generated and saved until then.
    """

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
        # Not `super()`: a builtin class among the bases may expect other arguments.
        Exception.__init__(self, f"trace {trace_id} {status}: {cause}" if cause else f"trace {trace_id} {status}")

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (self.message, self.trace_id, self.status, self.type, self.result)
        state = {name: value for name, value in vars(self).items() if name == "__notes__"}
        return _failed_again, (type(self), *arguments), state


def _failed_again(
    cls: type[TraceFailed], message: str, trace_id: str, status: str, kind: str | None, result: Result | None
) -> TraceFailed:
    return cls(message, trace_id=trace_id, status=status, type=kind, result=result)


class InterventionError(TraceFailed):
    """A block raised. `type` and `message` are its exception's; the rest says where in the user's own code.

    The error is an instance of the builtin exception class that the block's exception is of, too, so that `except
    ValueError` catches it where the block raised a `ValueError`. An exception of the user's own class counts as its
    nearest builtin base. `StopIteration`, `StopAsyncIteration`, groups and what is no `Exception` are left out.

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
        #: Python shows this attribute of a SyntaxError, and not its text.
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
