"""Quantiles of what was measured: always values that there were, none between two."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["StepTimes", "quantile", "quantiles", "step_ms"]

#: Over how many tokens the time of a step is a mean: outputs have several tokens at times, and the times of two reports
#: that come together are the same.
_SPAN = 8


def quantile(values: Sequence[float], share: float) -> float:
    """The value up to which this share of `values` lies; 0 if there are none."""
    return float(np.quantile(values, share, method="higher")) if len(values) else 0.0


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99 in milliseconds."""
    return {f"p{percent}": round(1000 * quantile(seconds, percent / 100), 2) for percent in (50, 95, 99)}


class StepTimes:
    """How long a request's steps take, in seconds: each a mean over at least `_SPAN` tokens that follow each other.

    Args:
        found: is extended.
    """

    def __init__(self, found: list[float]) -> None:
        self._found = found
        self._since: float | None = None
        self._tokens = 0

    def note(self, tokens: int, at: float) -> None:
        """Note that so many tokens more were there at a time."""
        if self._since is None:
            self._since = at
            return
        self._tokens += tokens
        if self._tokens >= _SPAN:
            self._found.append((at - self._since) / self._tokens)
            self._since, self._tokens = at, 0


def step_ms(seconds: Sequence[float]) -> dict[str, float]:
    """p10 and p50 of how long steps take (`StepTimes`), in milliseconds. p10 is a step that little else disturbs."""
    return {f"p{percent}": round(1000 * quantile(seconds, percent / 100), 3) for percent in (10, 50)}
