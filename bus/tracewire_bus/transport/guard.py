"""Parses data from Redis safely: malformed items are skipped, counted and logged.

Any client with access to Redis can write arbitrary data there. All readers on the bus therefore parse by a `Guard`: a
malformed item affects at most its own trace, never the reader.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from .errors import BusError

__all__ = ["Guard", "Malformed", "integer"]

logger = logging.getLogger("tracewire")

T = TypeVar("T")

#: Malformed items that are logged a minute, one line each.
LINES: Final = 10
_MINUTE_S: Final = 60.0
#: The greatest integer up to which Lua's floating-point numbers in Redis's scripts are exact.
GREATEST: Final = 2**53


class Malformed(BusError, ValueError):
    """A value in Redis is malformed. The text names the key, the entry under it, and the reason."""


class Guard:
    """Parses data from Redis. One for each bus; any thread may use it.

    Attributes:
        malformed: how many malformed items were found so far.
    """

    def __init__(self) -> None:
        self.malformed = 0
        self._since = float("-inf")
        self._lines = self._unlogged = 0

    def read(self, parse: Callable[..., T], *arguments: Any, key: object, entry: object = "") -> T | None:
        """The result of `parse(*arguments)`, or None if it raises. The log then names `key` and `entry`."""
        try:
            return parse(*arguments)
        except Exception as error:  # any error of parsing means that the data is malformed
            self.note(key, entry, error)
            return None

    def demand(self, parse: Callable[..., T], *arguments: Any, key: object, entry: object = "") -> T:
        """The result of `parse(*arguments)`, for callers that need it.

        Raises:
            Malformed: `parse` raised.
        """
        try:
            return parse(*arguments)
        except Exception as error:  # as in `read`
            self.note(key, entry, error)
            raise Malformed(f"{_describe(key, entry)} in Redis is malformed: {_reason(error)}") from error

    def note(self, key: object, entry: object, why: object) -> None:
        """Count a malformed item, and log it unless `LINES` items were logged within this minute already."""
        self.malformed += 1
        now = time.monotonic()
        if now - self._since >= _MINUTE_S:
            if self._unlogged:
                logger.warning("skipped %d more malformed items in Redis", self._unlogged)
            self._since, self._lines, self._unlogged = now, 0, 0
        if self._lines >= LINES:
            self._unlogged += 1
            return
        self._lines += 1
        more = "; no more of them are logged for a minute" if self._lines == LINES else ""
        logger.warning("skipped %s in Redis, which is malformed: %s%s", _describe(key, entry), _reason(why), more)


def integer(raw: Any, least: int = 0, most: int = GREATEST) -> int:
    """Parse an integer from Redis.

    Raises:
        ValueError: `raw` is not an integer from `least` to `most`.
    """
    if isinstance(raw, (bytes, str)) and len(raw) > 20:
        raise ValueError(f"expected an integer, got {len(raw)} characters")
    number = int(raw)
    if not least <= number <= most:
        raise ValueError(f"expected an integer from {least} to {most}, got {number}")
    return number


def _describe(key: object, entry: object) -> str:
    shown = [one.decode("utf-8", "backslashreplace") if isinstance(one, bytes) else str(one) for one in (key, entry)]
    return " of ".join(ascii(one)[:200] for one in (shown[1], shown[0]) if one)


def _reason(why: object) -> str:
    text = str(why) or type(why).__name__
    return ascii(text)[1:-1][:300]
