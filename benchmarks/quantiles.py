"""Quantiles of what was measured: always values that there were, none between two."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["quantile", "quantiles", "step_ms"]


def quantile(values: Sequence[float], share: float) -> float:
    """The value up to which this share of `values` lies; 0 if there are none."""
    return float(np.quantile(values, share, method="higher")) if len(values) else 0.0


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99 in milliseconds."""
    return {f"p{percent}": round(1000 * quantile(seconds, percent / 100), 2) for percent in (50, 95, 99)}


def step_ms(seconds: Sequence[float]) -> dict[str, float]:
    """p10 and p50 of how long steps take, in milliseconds. p10 is a step's time while nothing else disturbs it."""
    return {f"p{percent}": round(1000 * quantile(seconds, percent / 100), 3) for percent in (10, 50)}
