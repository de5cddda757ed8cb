"""Pauses between retries."""

from __future__ import annotations

import logging
import random

__all__ = ["Backoff", "outages"]

#: Takes what says that Redis does not answer, and so can be silenced by who tells of an outage otherwise.
outages = logging.getLogger("tracewire.outages")


class Backoff:
    """Exponential backoff with jitter: pauses double from `first_s` to `most_s`, each multiplied by 0.5 to 1.

    Attributes:
        failures: how many pauses were taken since the last `reset`.
    """

    def __init__(self, first_s: float = 0.05, most_s: float = 2.0) -> None:
        self._first_s, self._most_s = first_s, most_s
        self.failures = 0

    def next(self) -> float:
        """The length of the next pause in seconds."""
        self.failures += 1
        return random.uniform(0.5, 1.0) * min(self._most_s, self._first_s * (1 << min(self.failures - 1, 16)))

    def reset(self) -> None:
        """Start again with `first_s`, after a success."""
        self.failures = 0

    @property
    def level(self) -> int:
        """The level for logging the latest failure: a warning for the 3rd and the 30th in a row, else debug."""
        return logging.WARNING if self.failures in (3, 30) else logging.DEBUG
