"""Tells the user that a command waits for Redis, which does not answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio

from tracewire.client import Client
from tracewire_bus.transport.backoff import outages
from tracewire_bus.transport.errors import BusError, BusUnavailable
from tracewire_bus.transport.urls import redacted

from .printing import remark

__all__ = ["outages_told"]

#: The pause between two looks, and after how long without an answer the user is told, in seconds.
_LOOK_S, _AWAY_S = 2.0, 5.0


@asynccontextmanager
async def outages_told(client: Client) -> AsyncIterator[None]:
    """While the context lasts, say when Redis has not answered for some seconds, and when it answers again.

    What the client would log of the outage is not printed besides.
    """
    async with anyio.create_task_group() as group:
        group.start_soon(_look, client)
        yield
        group.cancel_scope.cancel()


@contextmanager
def _silenced() -> Iterator[None]:
    before = outages.disabled
    outages.disabled = True
    try:
        yield
    finally:
        outages.disabled = before


async def _look(client: Client) -> None:
    with _silenced():
        await _tell(client)


async def _tell(client: Client) -> None:
    """Look again and again, unless Redis refuses to be looked at."""
    bus = client._session.open_bus()
    away = False
    while True:
        await anyio.sleep(_LOOK_S)
        answers = False
        try:
            # The call tries again and again.
            with anyio.move_on_after(_AWAY_S):
                await bus.command("PING")
                answers = True
        except BusUnavailable:
            pass
        except BusError:
            # Redis refuses the command, so that an outage cannot be told from that.
            return
        if answers and away:
            remark("tracewire: Redis answers again")
        elif not answers and not away:
            remark(
                f"tracewire: still waiting for Redis at {redacted(client.url)}, which has not answered for "
                f"{_AWAY_S:g} s; Ctrl-C ends this command"
            )
        away = not answers
