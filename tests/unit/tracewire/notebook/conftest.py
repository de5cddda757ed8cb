"""A feed of one trace, and what it sends. Notebooks run on asyncio."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.support.until import until
from tracewire import Client
from tracewire.notebook.feed import Feed


class Views:
    """What a feed has sent."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def send(self, content: dict[str, Any], /, buffers: list[bytes] | None = None) -> None:
        """Keep a message, with what its buffer holds as `body`."""
        self.messages.append({**content, "body": json.loads(buffers[0]) if buffers else None})

    def events(self, view: str) -> list[Any]:
        """The events of a view's streams: pairs of position and event."""
        return [one for message in self.messages if message["view"] == view for one in message["body"] or ()]

    async def over(self, view: str) -> dict[str, Any]:
        """Wait for the end of a view's stream."""

        def last() -> list[dict[str, Any]]:
            return [one for one in self.messages if one["view"] == view and one.get("over")]

        await until(last)
        return last()[0]

    async def answer(self, number: int) -> dict[str, Any]:
        """Wait for the answer to an order of the view `a`."""

        def found() -> list[dict[str, Any]]:
            return [one for one in self.messages if (one["view"], one.get("id")) == ("a", number)]

        await until(found)
        return found()[0]


def spawn(function: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run it in a task, which fails the test if it fails."""
    asyncio.get_running_loop().create_task(function())


async def begun() -> None:
    """The trace is submitted."""


@pytest.fixture
def views() -> Views:
    return Views()


@pytest.fixture
def feed(client: Client, views: Views) -> Callable[..., Feed]:
    """Makes a feed of a trace."""

    def make(trace_id: str, begin: Any = begun) -> Feed:
        return Feed(client._session, trace_id, begin, views.send, spawn)

    return make
