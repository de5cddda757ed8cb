"""The end of a trace: its result, compared with the engine's digests, or the error that it raises."""

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
        result: the tokens, text and saves; None if saves are lost or out of reach.
        mismatch: the error for a result that differs from the engine's digests, or None.
    """

    def __init__(self, trace_id: str, fold: Fold) -> None:
        self.mismatch: StateMismatch | None = None
        self.result: Result | None = None
        try:
            fold.verify()
        except DigestMismatch as error:
            self.mismatch = StateMismatch(f"trace {trace_id}: {error}", error.names)
        if fold.lost is None:
            self.result = Result(trace_id, fold)
        self._trace_id, self._fold = trace_id, fold
        for warning in fold.warnings:
            logger.warning("trace %s: %s", trace_id, warning)

    def raise_failure(self) -> None:
        """Raise the error of a trace that did not end well.

        Raises:
            TraceRejected: the trace never ran.
            InterventionError: its block raised.
            TraceCancelled: a client cancelled it.
            TraceExpired: its deadline passed.
            TraceFailed: its engine could not go on; the subclass says why.
        """
        failure = failure_of(self._trace_id, self._fold.status, self._fold.error, self.result)
        if failure is not None:
            # Raised in place of the mismatch, because the caller can mend it.
            raise failure from self.mismatch

    def verified(self) -> Result:
        """The result, verified by digest.

        Raises:
            ValueMissing: saves are lost or out of reach.
            StateMismatch: it differs from the engine's digests.
        """
        if self.result is None:
            assert self._fold.lost is not None
            raise self._fold.lost
        if self.mismatch is not None:
            raise self.mismatch
        return self.result
