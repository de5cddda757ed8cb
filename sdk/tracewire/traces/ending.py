"""How a trace ended: its result, compared with what the engine collected, or the error that its end stands for."""

from __future__ import annotations

import logging

from tracewire.error_mapping import rejection
from tracewire.errors import StateMismatch, TracewireError
from tracewire_bus.domain.fold import DigestMismatch, Fold
from tracewire_bus.wire.messages import Failure, Status

from .failures import trace_failure
from .state import Result

__all__ = ["Ending", "failure_of"]

logger = logging.getLogger("tracewire")


def failure_of(
    trace_id: str, status: Status | None, error: Failure | None, result: Result | None = None
) -> TracewireError | None:
    """The error that a trace with this end raises, `None` for a good end."""
    if status in ("finished", "stopped"):
        return None
    if status == "rejected" and error is not None:
        return rejection(error, trace_id)
    return trace_failure(trace_id, status or "failed", error, result)


class Ending:
    """The end of a trace whose final was folded.

    Attributes:
        result: what was generated and saved.
        mismatch: how that differs from what the engine collected, if it does.
    """

    def __init__(self, trace_id: str, fold: Fold) -> None:
        self.mismatch: StateMismatch | None = None
        try:
            fold.verify()
        except DigestMismatch as error:
            self.mismatch = StateMismatch(f"trace {trace_id}: {error}", error.names)
        self.result = Result(trace_id, fold)
        self._trace_id, self._fold = trace_id, fold
        for warning in self.result.warnings:
            logger.warning("trace %s: %s", trace_id, warning)

    def raise_failure(self) -> None:
        """Raise the error that the end stands for, if it was not a good one.

        Raises:
            TraceRejected: the trace never ran.
            InterventionError: its block raised.
            TraceCancelled: somebody cancelled it.
            TraceExpired: its deadline passed.
            TraceFailed: its engine could not go on; the subclass says why.
        """
        failure = failure_of(self._trace_id, self._fold.status, self._fold.error, self.result)
        if failure is not None:
            # Why it ended comes first: that is the caller's to mend.
            raise failure from self.mismatch

    def verified(self) -> Result:
        """The result, if it is what the engine collected.

        Raises:
            StateMismatch: it is not.
        """
        if self.mismatch is not None:
            raise self.mismatch
        return self.result
