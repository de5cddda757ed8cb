"""Ends running traces that exceed a limit: how much they save, and for how long they are paused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import anyio

from tracewire_bus.domain.limit_table import LimitCounts, LimitExceeded, Limits
from tracewire_bus.wire.messages import Failure, Status

from .claims import Claims
from .trace_run import TraceRun

__all__ = ["TraceLimits", "failure_of_limit"]

#: How often running traces are compared with the limits, in seconds.
_CHECK_S: Final = 0.1


def failure_of_limit(error: LimitExceeded) -> Failure:
    """The failure of a trace that began to run and exceeds a limit."""
    return Failure(type="LimitExceeded", message=error.message, field=error.field)


class TraceLimits:
    """Compares the running traces with `limits`. `end` ends a run early."""

    def __init__(
        self, claims: Claims, limits: Limits, counts: LimitCounts, end: Callable[[TraceRun, Status, Failure], bool]
    ) -> None:
        self._claims = claims
        self._limits = limits
        self.counts = counts
        self._end = end

    async def run(self) -> None:
        """Compare every `_CHECK_S` seconds. Never ends by itself."""
        while True:
            await anyio.sleep(_CHECK_S)
            self.check(anyio.current_time())

    def check(self, now: float) -> None:
        """End each run that exceeds a limit at the time `now`, in seconds of the event loop's clock."""
        for run in self._claims.running():
            since = run.pause.paused_since
            error = self._exceeded(run, 0.0 if since is None else now - since)
            if error is not None and self._end(run, "failed", failure_of_limit(error)):
                self.counts.note(error)

    def _exceeded(self, run: TraceRun, paused_s: float) -> LimitExceeded | None:
        limits = self._limits
        if 0 < limits.trace_save_bytes < run.saved_bytes:
            message = f"a trace saves at most {limits.trace_save_bytes} bytes, got {run.saved_bytes}"
            return LimitExceeded("saves", message, "trace_save_bytes")
        if 0 < limits.paused_s < paused_s:
            return LimitExceeded("pause", f"a trace is paused for at most {limits.paused_s} s", "paused_s")
        return None
