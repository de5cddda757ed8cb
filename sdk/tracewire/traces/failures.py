"""How a trace that ran can fail, with what it had generated and saved until then."""

from __future__ import annotations

from tracewire.errors import TracewireError
from tracewire_bus.wire.messages import Failure

from .state import Result

__all__ = ["InterventionError", "TraceFailed"]


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
        super().__init__(f"trace {trace_id} {status}: {cause}" if cause else f"trace {trace_id} {status}")


class InterventionError(TraceFailed):
    """A block raised. `type` and `message` are its exception's; the rest says where in the user's own code.

    Attributes:
        filename, line, source: the user's line that raised, as its file had it when the block was submitted.
        remote_traceback: the frames that are the user's, as text, or None.
        result: what had been generated and saved until then.
    """

    def __init__(self, failure: Failure, *, trace_id: str, result: Result | None = None) -> None:
        super().__init__(failure.message, trace_id=trace_id, status="failed", type=failure.type, result=result)
        self.filename = failure.filename
        self.line = failure.line
        self.source = failure.source.strip() if failure.source else failure.source
        self.remote_traceback = failure.traceback
        text = f"{failure.type}: {failure.message}"
        if failure.line is not None:
            text += f"\n  at {failure.filename or '<block>'}:{failure.line}"
            if self.source:
                text += f"\n    {self.source}"
        self.args = (text,)
