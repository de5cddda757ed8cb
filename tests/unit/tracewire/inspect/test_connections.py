"""The client of a provider: one for an event loop, another one in the next."""

from __future__ import annotations

import asyncio

import anyio
import anyio.to_thread
import pytest

from tracewire import ClientClosed, InvalidUrl
from tracewire.inspect.connections import Connection, connected_to


async def test_generations_share_one_client(embedded: str, prefix: str) -> None:
    connection = Connection(embedded, {"prefix": prefix, "name": "evaluation"})
    found = []

    async def ask() -> None:
        found.append(await connection.client())

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(ask)
    assert len(set(map(id, found))) == 1
    assert await connected_to(connection.url, prefix) is found[0]
    await connection.aclose()
    with pytest.raises(ClientClosed):
        await found[0].models.list()
    again = await connection.client()
    assert again is not found[0]
    assert await again.models.list() == []
    await connection.aclose()


def test_each_event_loop_has_a_client_of_its_own(embedded: str, prefix: str) -> None:
    connection = Connection(embedded, {"prefix": prefix})

    async def ask() -> object:
        client = await connection.client()
        assert await client.models.list() == []
        return client

    first, second = asyncio.run(ask()), asyncio.run(ask())
    assert first is not second


async def test_a_loop_that_still_runs_elsewhere_keeps_its_client(embedded: str, prefix: str) -> None:
    connection = Connection(embedded, {"prefix": prefix})
    here = await connection.client()
    there = await anyio.to_thread.run_sync(asyncio.run, connection.client())
    assert there is not here
    assert await here.models.list() == []
    await here.aclose()


async def test_a_password_is_not_shown(prefix: str) -> None:
    connection = Connection("redis://me:secret@localhost:1", {"prefix": prefix})
    assert connection.url == "redis://me:***@localhost:1"
    assert await connected_to("redis://elsewhere:1", prefix) is None


def test_without_a_url_the_provider_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRACEWIRE_URL", raising=False)
    with pytest.raises(InvalidUrl, match="no URL"):
        Connection(None, {})
