"""Clients: connecting, closing, and what they leave."""

# ruff: noqa: ASYNC240

# ruff: noqa: ASYNC240
from __future__ import annotations

import gc
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

import tracewire
from tests.support.bus_engine import BusEngine, Stage, tiny
from tests.support.redis.proxy import proxy
from tests.support.tasks import all_tasks, task_name
from tracewire import ConnectError
from tracewire_bus.bus import Bus

#: Nothing here takes longer; a test that would hang fails instead.
PATIENCE = 60


async def test_connect_needs_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRACEWIRE_URL", raising=False)
    with pytest.raises(ConnectError, match="TRACEWIRE_URL"):
        async with tracewire.connect():
            pass


async def test_connect_takes_the_url_of_the_environment(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEWIRE_URL", redis_url)
    async with tracewire.connect() as client:
        assert client.url == redis_url
        assert await client.models.list() == []


@pytest.mark.parametrize("url", ["unix:///nowhere/redis.sock", "redis://127.0.0.1:1", "http://example.org", "nonsense"])
async def test_connect_says_when_nothing_answers(url: str) -> None:
    with pytest.raises(ConnectError, match="cannot connect"), anyio.fail_after(PATIENCE):
        async with tracewire.connect(url):
            pass


async def test_connections_that_nobody_answers_do_not_hold_up_connecting(embedded: str, tmp_path: Path) -> None:
    async with proxy(embedded, tmp_path) as through:
        through.served = 1
        with anyio.fail_after(20):
            async with tracewire.connect(through.url) as client:
                assert await client.models.list() == []


async def test_connecting_can_be_given_up_at_any_moment(
    embedded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracewire_bus.bus._WARM_S", 1000.0)
    before = all_tasks()
    async with proxy(embedded, tmp_path) as through:
        through.served = 1
        opened = anyio.Event()
        warm = Bus.warm

        async def noted(self: Bus) -> None:
            opened.set()
            await warm(self)

        monkeypatch.setattr(Bus, "warm", noted)
        async with anyio.create_task_group() as group:

            async def connect() -> None:
                async with tracewire.connect(through.url):
                    raise AssertionError("it was given up")

            group.start_soon(connect)
            await opened.wait()
            group.cancel_scope.cancel()
        assert not [task for task in all_tasks() - before if task_name(task).startswith("tracewire")]


async def test_embedded_is_shared_by_its_url_and_leaves_nothing() -> None:
    async with tracewire.connect("embedded://") as client:
        path = client.url.removeprefix("unix://")
        assert os.path.exists(path)
        async with BusEngine.running(client.url, "tw", tiny), tracewire.connect(client.url) as other:
            async with other.trace("tiny", "hello", max_tokens=3) as trace:
                assert (await trace.result()).text == "one two three"
            assert (await client.get_state(trace.id)).text == "one two three"
    assert not os.path.exists(path)
    assert not os.path.exists(os.path.dirname(path))


async def test_leaving_the_client_leaves_no_task_no_connection_and_no_thread(
    redis_url: str, prefix: str, engine: Callable[..., Any]
) -> None:
    gate = anyio.Event()

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("one", {"scores": 0})
        await gate.wait()

    async with Bus.open(redis_url, prefix=prefix) as observer, engine(script):

        async def connections() -> set[str]:
            return {each.split()[0] for each in (await observer.command("CLIENT", "LIST")).decode().splitlines()}

        await connections()
        async with tracewire.connect(redis_url, prefix=prefix) as warm, warm.trace("tiny", "hello") as trace:
            # The engine has opened all its connections then.
            await anext(trace)
        tasks, threads = all_tasks(), set(threading.enumerate())
        before = await connections()
        async with tracewire.connect(redis_url, prefix=prefix) as client:
            # Traces and subscriptions in every state, none of them closed.
            followed = client.trace("tiny", "hello")
            await followed.start()
            assert (await anext(followed)).text == "one"
            idle = client.trace("tiny", "hello")
            await idle.start()
            subscriptions = [client.subscribe(followed.id) for _ in range(20)]
            for subscription in subscriptions:
                assert isinstance(await anext(subscription), tracewire.Accepted)
            during = await connections()
            assert 1 <= len(during - before) <= 4, "connections do not grow with subscriptions"
        left = {task for task in all_tasks() - tasks if "BusEngine" not in task_name(task)}
        assert not left
        assert set(threading.enumerate()) <= threads
        with anyio.fail_after(PATIENCE):
            # A closed socket is seen by the server in its own time.
            while await connections() & (during - before):
                await checkpoint()
        with pytest.raises(ConnectError, match="closed"):
            await anext(subscriptions[0])
        with pytest.raises(ConnectError, match="closed"):
            await followed.result()
        gate.set()


async def test_what_the_body_raises_comes_out_as_it_is(redis_url: str) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with tracewire.connect(redis_url):
            raise KeyError("mine")


async def test_a_closed_client_says_so(redis_url: str) -> None:
    async with tracewire.connect(redis_url) as client:
        assert "closed" not in repr(client)
    assert "closed" in repr(client)
    with pytest.raises(ConnectError, match="the client is closed"):
        await client.models.list()
    with pytest.raises(ConnectError, match="the client is closed"):
        client.trace("tiny", "hello")
    with pytest.raises(ConnectError, match="the client is closed"):
        client.subscribe("any")


async def test_an_awaited_client_stays_open_until_it_is_closed(redis_url: str, prefix: str) -> None:
    client = await tracewire.connect(redis_url, prefix=prefix)
    gc.collect()
    assert await client.models.list() == []
    await client.aclose()
    await client.aclose()
    with pytest.raises(ConnectError, match="the client is closed"):
        await client.models.list()


async def test_a_client_outlives_what_it_was_entered_by(redis_url: str, prefix: str) -> None:
    """As in a notebook: nothing holds what `__aenter__` was called on."""
    client = await tracewire.connect(redis_url, prefix=prefix).__aenter__()
    gc.collect()
    assert await client.models.list() == []
    await client.aclose()


async def test_a_client_that_is_not_connected_yet_says_how(redis_url: str) -> None:
    connecting = tracewire.connect(redis_url)
    with pytest.raises(AttributeError, match=r"no 'models' before it is connected.*await tracewire\.connect"):
        _ = connecting.models
    with pytest.raises(AttributeError, match="no attribute 'modle'"):
        _ = connecting.modle
    async with connecting:
        with pytest.raises(tracewire.TracewireError, match="entered before"):
            await connecting.__aenter__()


CONNECTING: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a url that is a number": ({"url": 6379}, TypeError, "url: expected text"),
    "a prefix that is a number": ({"prefix": 5}, TypeError, "prefix: expected text"),
    "a prefix with braces": ({"prefix": "a{b"}, tracewire.ConnectError, "a prefix must not have braces"),
    "a lease of text": ({"lease_ttl": "10"}, TypeError, "lease_ttl: expected a number of seconds"),
    "a short lease": ({"lease_ttl": 0.5}, ValueError, "lease_ttl: expected 1 seconds or more"),
    "an endless lease": ({"lease_ttl": math.inf}, ValueError, "lease_ttl: expected"),
    "a retry_timeout of text": ({"retry_timeout": "20"}, TypeError, "retry_timeout: expected a number of seconds"),
    "less than no time": ({"retry_timeout": -1}, ValueError, "retry_timeout: expected 0 seconds or more"),
}


@pytest.mark.parametrize("case", CONNECTING)
async def test_what_nobody_can_connect_with_is_named(redis_url: str, case: str) -> None:
    given, kind, message = CONNECTING[case]
    with pytest.raises(kind, match=message):
        async with tracewire.connect(**{"url": redis_url, **given}):
            pass


async def test_an_option_of_the_url_that_there_is_not(redis_url: str) -> None:
    with pytest.raises(tracewire.ConnectError, match=r"an option that redis-py does not know.*'nonsense'"):
        async with tracewire.connect(f"{redis_url}?nonsense=1"):
            pass
