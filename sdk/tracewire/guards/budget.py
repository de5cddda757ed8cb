"""How often a guard may act."""

from __future__ import annotations

from collections import Counter, deque

from .rules import Budget

__all__ = ["Actions"]

_MINUTE = 60.0


class Actions:
    """The actions of one guard process, counted against its budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._times: deque[float] = deque()
        self._by_trace: Counter[str] = Counter()

    def take(self, trace: str, now: float) -> str:
        """Count an action on a trace at the time `now`, in seconds. Returns the limit that forbids it, or `""`."""
        budget = self._budget
        while self._times and self._times[0] <= now - _MINUTE:
            self._times.popleft()
        if budget.actions_per_minute and len(self._times) >= budget.actions_per_minute:
            return "actions_per_minute"
        if budget.actions_per_trace and self._by_trace[trace] >= budget.actions_per_trace:
            return "actions_per_trace"
        if budget.actions_per_minute:
            self._times.append(now)
        self._by_trace[trace] += 1
        return ""

    def forget(self, trace: str) -> None:
        """Forget the actions on a trace that has ended."""
        self._by_trace.pop(trace, None)
