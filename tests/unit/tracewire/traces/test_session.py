"""A client's life: made without I/O, connected once, and closed from anywhere in a bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

import tracewire
from tests.support.bus_engine import BusEngine, Stage, engine_info, tiny
from tests.support.redis.proxy import proxy
from tests.support.tasks import all_tasks, in_another_task, task_name
from tracewire import Client, ClientClosed, ConnectError, TracewireError

PATIENCE = 60


async def test_a_client_is_made_without_io_and_without_a_loop(embedded: str, prefix: str) -> None:
    made = await anyio.to_thread.run_sync(lambda: Client(embedded, prefix=prefix))
    assert "not connected" in repr(made)
    with pytest.raises(ConnectError, match=r"not connected yet: enter it .* or `await client\.connect\(\)`"):
        await made.models.list()
    with pytest.raises(ConnectError, match="not connected yet"):
        made.trace("tiny", "hello")
    async with made as client:
        assert client is made
        assert await client.models.list() == []
    assert "closed" in repr(made)
    with pytest.raises(ClientClosed):
        await made.connect()


async def test_connecting_twice_is_once_and_entering_twice_is_refused(embedded: str, prefix: str) -> None:
    client = Client(embedded, prefix=prefix, retry_timeout=timedelta(seconds=20), lease_ttl=timedelta(seconds=5))
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(client.connect)
    bus = client._session.open_bus()
    assert (await client.connect())._session.open_bus() is bus
    async with client:
        with pytest.raises(TracewireError, match="entered before"):
            await client.__aenter__()
    assert client._session.closed


async def test_a_client_that_was_never_connected_closes(embedded: str) -> None:
    client = Client(embedded)
    await client.aclose()
    await client.aclose()
    with pytest.raises(ClientClosed):
        await client.connect()


async def test_closing_while_it_connects_gives_the_connecting_up(embedded: str, tmp_path: Path) -> None:
    async with proxy(embedded, tmp_path) as through:
        through.served = 0
        client = Client(through.url, retry_timeout=None)
        failed: list[BaseException] = []

        async def connect() -> None:
            try:
                await client.connect()
            except ClientClosed as error:
                failed.append(error)

        with anyio.fail_after(PATIENCE):
            async with anyio.create_task_group() as group:
                group.start_soon(connect)
                while client._session._opening is None:
                    await anyio.lowlevel.checkpoint()
                await client.aclose()
        assert "closed while it connected" in str(failed[0])


async def test_several_tasks_close_it_at_once_and_each_returns_when_it_is_closed(embedded: str, prefix: str) -> None:
    before = all_tasks()
    client = await tracewire.connect(embedded, prefix=prefix)
    left: list[bool] = []

    async def close() -> None:
        await client.aclose()
        left.append(not {task for task in all_tasks() - before if task_name(task).startswith("tracewire")})

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(close)
    assert left == [True] * 4


@pytest.mark.parametrize("retry_timeout", [0, None])
async def test_closing_after_the_connection_broke_ends(
    embedded: str, prefix: str, tmp_path: Path, retry_timeout: int | None
) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await anyio.sleep_forever()

    async with BusEngine.running(embedded, prefix, script, engine_info()), proxy(embedded, tmp_path) as through:
        client = await tracewire.connect(through.url, prefix=prefix, retry_timeout=retry_timeout)
        trace = client.trace("tiny", "hello")
        await trace.start()
        await trace.accepted()
        await through.cut()
        with anyio.fail_after(PATIENCE):
            await client.aclose()


def test_a_client_whose_loop_is_gone_closes_on_another(embedded: str, prefix: str) -> None:
    """As in a notebook, or a script that calls `asyncio.run` twice."""

    async def connected() -> Client:
        return await tracewire.connect(embedded, prefix=prefix)

    client = asyncio.run(connected())
    asyncio.run(client.aclose())
    assert client._session.closed


async def test_another_loop_that_runs_may_not_close_it(embedded: str, prefix: str) -> None:
    async with tracewire.connect(embedded, prefix=prefix) as client:

        async def close() -> None:
            with pytest.raises(TracewireError, match="another event loop"):
                await client.aclose()

        await anyio.to_thread.run_sync(asyncio.run, close())
        assert await client.models.list() == []


@pytest.fixture
async def entered_elsewhere(embedded: str, prefix: str) -> AsyncIterator[Client]:
    """A client that one task enters and another leaves, as some fixtures and frameworks do."""
    client = Client(embedded, prefix=prefix)
    await in_another_task(client.__aenter__())
    yield client
    await in_another_task(client.__aexit__(None, None, None))
    assert client._session.closed


async def test_a_client_is_entered_in_one_task_and_left_in_another(entered_elsewhere: Client, prefix: str) -> None:
    client = entered_elsewhere
    async with (
        BusEngine.running(client.url, prefix, tiny, engine_info()),
        client.trace("tiny", "hello") as trace,
    ):
        assert (await trace.result()).text == "one two three"


def test_there_is_no_client_where_no_event_loop_runs() -> None:
    entering = tracewire.connect("redis://127.0.0.1:1").__aenter__()
    with pytest.raises(TracewireError, match="no event loop runs here"):
        entering.send(None)  # type: ignore[attr-defined]


async def test_another_event_loop_is_refused_and_harms_nothing(client: Client, engine: Any) -> None:
    async def elsewhere(call: Callable[[], Awaitable[Any]]) -> None:
        with pytest.raises(TracewireError, match="belongs to another event loop"):
            await call()

    async with engine():
        trace = client.trace("tiny", "a")
        for call in (partial(client.models.get, "tiny"), trace.start, client.subscribe(trace.id).start):
            await anyio.to_thread.run_sync(asyncio.run, elsewhere(call))
        # A thread without a loop of its own asks this one.
        model = await anyio.to_thread.run_sync(anyio.from_thread.run, client.models.get, "tiny")
        assert model.name == "tiny"
        async with trace:
            assert (await trace.result()).text == "one two three"
