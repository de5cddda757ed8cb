"""Commands that go with a round trip of the writer, and so cost none of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tracewire_bus.transport.link import Link

__all__ = ["Riders", "execute_with"]


class Riders(Protocol):
    """Has commands that may go with a round trip."""

    def board(self) -> Sequence[tuple[Any, ...]]:
        """The commands that go now. If there are any, `landed` follows before the next call."""

    def landed(self, replies: Sequence[Any]) -> None:
        """Takes the replies, of which some may be errors. There are none if the connection failed meanwhile."""


async def execute_with(riders: Riders | None, link: Link, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Execute the commands of a batch, and behind them those of riders. Returns the replies to the batch.

    Raises:
        redis.exceptions.RedisError, TimeoutError: see `Link.execute`.
    """
    if not commands:
        return []
    more = () if riders is None else riders.board()
    if riders is None or not more:
        return await link.execute(*commands, stay=True, wait=False)
    replies: list[Any] = []
    try:
        replies = await link.execute(*commands, *more, stay=True, wait=False)
    finally:
        riders.landed(replies[len(commands) :])
    return replies[: len(commands)]
