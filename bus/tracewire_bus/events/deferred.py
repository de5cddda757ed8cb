"""Commands that go with events which Redis has, and that wait for a slot of a cluster to be moved."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio

from .appends import Append, DeferredCommand, is_moving

__all__ = ["PROBES", "RETRY_S", "DeferredCommands", "MoveWarning"]

logger = logging.getLogger("tracewire")

#: How often what waits for memory, or for a slot to be moved, is tried again, in seconds.
RETRY_S: float = 0.1
#: So much of what waits for slots to be moved is tried at once.
PROBES: Final = 64
#: A slot that is being moved for longer is mentioned in the log, in seconds.
_LONG_S: Final = 5.0

Execute = Callable[..., Awaitable[list[Any]]]


class DeferredCommands:
    """The commands that wait, in the order in which they were tried last."""

    def __init__(self, end: Callable[[Append, Exception | None], None]) -> None:
        self._end = end
        self._waiting: dict[int, DeferredCommand] = {}
        self._numbers = itertools.count()
        #: When to try them again, by the event loop's clock.
        self.retry_at = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def commands(self) -> set[tuple[Any, ...]]:
        """All that wait."""
        return {one.command for one in self._waiting.values()}

    def add(self, command: tuple[Any, ...], item: Append | None, error: Exception | None) -> None:
        """Have a command wait. `item` ends with it, and with `error`."""
        if not self._waiting:
            self.retry_at = anyio.current_time() + RETRY_S
        self._waiting[next(self._numbers)] = DeferredCommand(command, item, error)

    def clear(self) -> list[Append]:
        """Drop all commands. Returns the appends that waited for them."""
        items = [one.item for one in self._waiting.values() if one.item is not None]
        self._waiting.clear()
        return items

    async def retry(self, execute: Execute) -> None:
        """Try some of the commands again by `execute`, those first that were tried longest ago."""
        some = list(self._waiting.items())[:PROBES]
        done = 0
        try:
            # Each slot's in their order. A tuple: none waits for those of another slot.
            replies = await execute(*(tuple(one.command) for _, one in some), moving=True)
        except Exception as problem:
            logger.warning("what goes with %d events could not be carried out: %s", len(some), problem)
            for number, one in some:
                if one.item is not None and self._waiting.pop(number, None) is not None:
                    self._end(one.item, problem)
        else:
            for (number, one), reply in zip(some, replies, strict=True):
                if self._waiting.pop(number, None) is None:
                    continue
                if is_moving(reply):
                    self._waiting[number] = one
                    continue
                done += 1
                if one.item is not None:
                    self._end(one.item, one.error)
        # Other appends go in between.
        self.retry_at = anyio.current_time() + (0.0 if done else RETRY_S)


class MoveWarning:
    """Warns of slots whose move takes its time."""

    def __init__(self) -> None:
        self._since = self._warn_at = 0.0

    def note(self, count: int) -> None:
        """`count` events wait now for slots to be moved."""
        now = anyio.current_time()
        if not count:
            self._since = 0.0
        elif not self._since:
            self._since, self._warn_at = now, now + _LONG_S
        elif now >= self._warn_at:
            self._warn_at = now + _LONG_S
            logger.warning(
                "%d events have waited for slots that are being moved, for %.0f s: has a move been broken off?",
                *(count, now - self._since),
            )
