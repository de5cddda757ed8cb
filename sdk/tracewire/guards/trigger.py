"""When a rule's alarm goes off: thresholds with hysteresis, over a number of tokens in a row."""

from __future__ import annotations

from .rules import Rule

__all__ = ["Trigger"]


class Trigger:
    """One rule over the values of one choice of one trace."""

    def __init__(self, rule: Rule) -> None:
        self._tokens = rule.tokens
        # One threshold for both directions: that of `below` with both sides negated.
        self._sign = 1.0 if rule.above is not None else -1.0
        threshold = rule.above if rule.above is not None else rule.below
        assert threshold is not None
        self._threshold = self._sign * threshold
        self._release = self._threshold if rule.release is None else self._sign * rule.release
        self._beyond = 0
        self._sleeps = False

    def feed(self, value: float) -> bool:
        """Take the value of the next token. Returns whether the alarm goes off at this token."""
        signed = self._sign * value
        # A NaN is beyond the threshold, and wakes no rule.
        self._beyond = 0 if signed <= self._threshold else self._beyond + 1
        if self._sleeps:
            self._sleeps = not signed <= self._release
            return False
        self._sleeps = self._beyond >= self._tokens
        return self._sleeps
