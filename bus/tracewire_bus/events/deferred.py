"""Commands that belong to appended events and wait until a cluster has moved their slots."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio

from .appends import Append, DeferredCommand, is_moving

__all__ = ["PROBES", "RETRY_S", "DeferredCommands", "EndedAppends", "MoveWarning"]

logger = logging.getLogger("tracewire")

#: Time between two tries of appends and commands that wait for memory or for a slot's move, in seconds.
RETRY_S: float = 0.1
#: How many appends or commands that wait for slots to be moved are tried at once.
PROBES: Final = 64
#: The writer logs a warning if a slot's move takes longer, in seconds.
_LONG_S: Final = 5.0

Execute = Callable[..., Awaitable[list[Any]]]


class DeferredCommands:
    """The waiting commands, in the order of their last tries. `end` ends an append with an error or None."""

    def __init__(self, end: Callable[[Append, Exception | None], None]) -> None:
        self._end = end
        self._waiting: dict[int, DeferredCommand] = {}
        self._numbers = itertools.count()
        #: When to try them again, by the event loop's clock.
        self.retry_at = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def commands(self) -> set[tuple[Any, ...]]:
        """All waiting commands."""
        return {one.command for one in self._waiting.values()}

    def add(self, command: tuple[Any, ...], item: Append | None, error: Exception | None) -> None:
        """Add a command. `item` ends after the command, with `error`."""
        if not self._waiting:
            self.retry_at = anyio.current_time() + RETRY_S
        self._waiting[next(self._numbers)] = DeferredCommand(command, item, error)

    def clear(self) -> list[Append]:
        """Drop all commands. Returns the appends that waited for them."""
        items = [one.item for one in self._waiting.values() if one.item is not None]
        self._waiting.clear()
        return items

    async def retry(self, execute: Execute) -> None:
        """Try the `PROBES` first commands again by `execute`, which is `Restorer.execute_until_answered`."""
        some = list(self._waiting.items())[:PROBES]
        done = 0
        try:
            # As plain tuples, so that the link does not hold a command back for those of other slots.
            replies = await execute(*(tuple(one.command) for _, one in some), moving=True)
        except Exception as problem:
            logger.warning("commands of %d events failed: %s", len(some), problem)
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
        # The writer sends other appends in between.
        self.retry_at = anyio.current_time() + (0.0 if done else RETRY_S)


class EndedAppends:
    """The appends of a flush that have ended, but for those whose queue entries are still to be settled.

    Args:
        end: ends an append with an error or None.
        deferred: has the commands for which a cluster must move a slot first.
    """

    def __init__(self, end: Callable[[Append, Exception | None], None], deferred: DeferredCommands) -> None:
        self._end, self._deferred = end, deferred
        self._late: list[tuple[Append, tuple[Any, ...], Exception | None]] = []

    def add(self, item: Append, error: Exception | None = None) -> None:
        """End an append, or keep it for `settle`."""
        if item.settle is not None and item.settles_late:
            # As a plain tuple, so that the link does not hold it back for those of other slots.
            self._late.append((item, tuple(item.settle), error))
        else:
            self._end(item, error)

    async def settle(self, execute: Execute) -> None:
        """Settle the queue entries in one round trip by `execute`, which is `Restorer.execute_until_answered`."""
        if not self._late:
            return
        replies = await execute(*(command for _, command, _ in self._late), moving=True)
        for (item, command, error), reply in zip(self._late, replies, strict=True):
            if is_moving(reply):
                self._deferred.add(command, item, error)
            else:
                self._end(item, error)


class MoveWarning:
    """Logs a warning if events wait long for slots to be moved."""

    def __init__(self) -> None:
        self._since = self._warn_at = 0.0

    def note(self, count: int) -> None:
        """Note that `count` events wait for slots to be moved at present."""
        now = anyio.current_time()
        if not count:
            self._since = 0.0
        elif not self._since:
            self._since, self._warn_at = now, now + _LONG_S
        elif now >= self._warn_at:
            self._warn_at = now + _LONG_S
            logger.warning(
                "%d events have waited %.0f s for slots that are being moved: was a move interrupted?",
                *(count, now - self._since),
            )
