"""One guard for whatever comes from Redis: what is malformed is passed over, counted, and told in the log.

Anybody who may write to Redis may write anything there. So no reader on the bus parses what it has read but by a
`Guard`: what cannot be parsed costs its own trace, or nobody, and never the reader.
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

#: How many malformed items the log names within a minute, each on a line of its own.
LINES: Final = 10
_MINUTE_S: Final = 60.0
#: The greatest integer that Redis's scripts, which count in floating point, tell from its neighbours.
GREATEST: Final = 2**53


class Malformed(BusError, ValueError):
    """What stands in Redis under a key is not what should. Says which key, which entry of it, and why."""


class Guard:
    """Parses what was read from Redis. One for each bus; any thread may use it.

    Attributes:
        malformed: how many malformed items were found so far.
    """

    def __init__(self) -> None:
        self.malformed = 0
        self._since = float("-inf")
        self._lines = self._silent = 0

    def read(self, parse: Callable[..., T], *arguments: Any, key: object, entry: object = "") -> T | None:
        """`parse(*arguments)`; None where that raises. `key` and `entry` say in the log what was parsed."""
        try:
            return parse(*arguments)
        except Exception as error:  # whatever parsing raises, it is about what was read
            self.note(key, entry, error)
            return None

    def demand(self, parse: Callable[..., T], *arguments: Any, key: object, entry: object = "") -> T:
        """`parse(*arguments)`, where the caller cannot go on without.

        Raises:
            Malformed: parsing raised.
        """
        try:
            return parse(*arguments)
        except Exception as error:  # likewise
            self.note(key, entry, error)
            raise Malformed(f"{_named(key, entry)} in Redis is malformed: {_why(error)}") from error

    def note(self, key: object, entry: object, why: object) -> None:
        """Count a malformed item and tell of it, unless the log has named `LINES` within this minute already."""
        self.malformed += 1
        now = time.monotonic()
        if now - self._since >= _MINUTE_S:
            if self._silent:
                logger.warning("passed over %d more malformed items in Redis", self._silent)
            self._since, self._lines, self._silent = now, 0, 0
        if self._lines >= LINES:
            self._silent += 1
            return
        self._lines += 1
        more = "; the log names no more of them for a minute" if self._lines == LINES else ""
        logger.warning("passed over %s in Redis, which is malformed: %s%s", _named(key, entry), _why(why), more)


def integer(raw: Any, least: int = 0, most: int = GREATEST) -> int:
    """The integer that stands in Redis as `raw`.

    Raises:
        ValueError: it is none, or is not between `least` and `most`.
    """
    if isinstance(raw, (bytes, str)) and len(raw) > 20:
        raise ValueError(f"expected an integer, got {len(raw)} characters")
    number = int(raw)
    if not least <= number <= most:
        raise ValueError(f"expected an integer from {least} to {most}, got {number}")
    return number


def _named(key: object, entry: object) -> str:
    shown = [one.decode("utf-8", "backslashreplace") if isinstance(one, bytes) else str(one) for one in (key, entry)]
    return " of ".join(ascii(one)[:200] for one in (shown[1], shown[0]) if one)


def _why(why: object) -> str:
    text = str(why) or type(why).__name__
    return ascii(text)[1:-1][:300]
