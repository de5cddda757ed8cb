"""Sets after how long a thread hands over the interpreter, without rounding down what was asked for."""

from __future__ import annotations

import sys

__all__ = ["set_switch_interval"]

_HALF_US = 0.5e-6


def set_switch_interval(seconds: float) -> None:
    """Set the switch interval to the nearest microsecond.

    The interpreter keeps whole microseconds and rounds down: an interval of 50 us reads as a little less, and would be
    set as 49 us.
    """
    sys.setswitchinterval(seconds + _HALF_US)
