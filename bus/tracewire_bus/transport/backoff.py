"""How long to wait before another attempt."""

from __future__ import annotations

import logging
import random

__all__ = ["Backoff"]


class Backoff:
    """Waits that double from `first_s` to `most_s`, each shortened at random so that a crowd does not come back at
    once.
    """

    def __init__(self, first_s: float = 0.05, most_s: float = 2.0) -> None:
        self._first_s, self._most_s = first_s, most_s
        self.failures = 0

    def next(self) -> float:
        """How long to wait now, in seconds."""
        self.failures += 1
        return random.uniform(0.5, 1.0) * min(self._most_s, self._first_s * (1 << min(self.failures - 1, 16)))

    def reset(self) -> None:
        """It worked again."""
        self.failures = 0

    @property
    def level(self) -> int:
        """How loud to say that it failed: one broken connection is nothing, an outage is said once, and once more."""
        return logging.WARNING if self.failures in (3, 30) else logging.DEBUG
