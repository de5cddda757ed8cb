"""What keeps Redis from doing what a client asks has a class each, by which a service knows whether to ask again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

import tracewire
from tests.support.bus_engine import engine_info
from tests.support.redis.proxy import proxy
from tracewire import BusFull, BusRefused, BusUnavailable, Client, ClientClosed, ConnectError
from tracewire_bus.bus import Bus
from tracewire_bus.store.dead_letters import DeadLetters
from tracewire_bus.store.queue_entries import Taken
from tracewire_bus.transport.embedded import EmbeddedServer
from tracewire_bus.wire.messages import Invoke, Submission


@pytest.fixture
async def own() -> AsyncIterator[Bus]:
    """A bus on a Redis of this test's own, on which a model is known."""
    async with EmbeddedServer.start() as server, Bus.open(server.url) as bus:
        await bus.registry.register(engine_info(), ttl_s=600)
        yield bus


async def dead(bus: Bus) -> str:
    """Id of a dead letter."""
    await bus.submit(Submission(trace="dead", model="tiny", invokes=[Invoke(prompt="x")], detach=True))
    (taken,) = await bus.queue.take("tiny", "e", 1, 0)
    assert isinstance(taken, Taken)
    await bus.queue.dead_letter("tiny", taken, "why")
    (letter,) = await bus.dead_letters.list()
    return letter.id


async def test_a_client_that_is_closed(redis_url: str, prefix: str) -> None:
    async with tracewire.connect(redis_url, prefix=prefix) as client:
        pass
    with pytest.raises(ClientClosed, match="the client is closed"):
        await client.models.list()


async def test_a_redis_that_is_away(bus: Bus, tmp_path: Path) -> None:
    async with (
        proxy(bus.url, tmp_path) as way,
        tracewire.connect(way.url, prefix=bus.keys.prefix, retry_timeout=0) as client,
    ):
        way.away = True
        await way.cut()
        with pytest.raises(BusUnavailable, match="is away"):
            await client.models.list()
    with pytest.raises(BusUnavailable, match="cannot connect"):
        async with tracewire.connect("redis://127.0.0.1:1"):
            pass


async def test_a_redis_that_refuses(own: Bus) -> None:
    await own.command("ACL", "SETUSER", "guest", "on", ">secret", "~*", "+ping")
    url = f"{own.url}?username=guest&password="
    async with tracewire.connect(url + "secret") as client:
        with pytest.raises(BusRefused, match="does not allow this user"):
            await client.models.list()
    with pytest.raises(BusRefused, match="refused the credentials"):
        async with tracewire.connect(url + "wrong"):
            pass


@pytest.mark.parametrize("url", ["http://example.org", "", None])
async def test_what_is_no_url(url: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRACEWIRE_URL", raising=False)
    with pytest.raises(ConnectError) as refused:
        async with tracewire.connect(url):
            pass
    assert type(refused.value) is tracewire.InvalidUrl


async def test_a_redis_that_is_full(own: Bus) -> None:
    letter = await dead(own)
    async with tracewire.connect(own.url, retry_timeout=0) as client:
        trace = client.trace("tiny", "hello", live={"alpha": 0.0}, detach=True)
        await trace.start()
        await own.command("CONFIG", "SET", "maxmemory", 1)
        with pytest.raises(BusFull, match="no memory left"):
            await trace.steer(alpha=1.0)
        # It is looked at once a second.
        client._session.open_bus().memory._left.forget()
        for start in (client.trace("tiny", "hello", detach=True).start(), client.dead_letters.resubmit(letter)):
            with pytest.raises(BusFull, match="start it again later"):
                await start
        await own.command("CONFIG", "SET", "maxmemory", 0)
        await trace.aclose()


async def test_a_first_burst_keeps_the_reserve_of_memory(own: Bus) -> None:
    await own.command("SET", "large", b"x" * 50_000_000)
    _, used, _ = await own.memory.usage()
    # Less is left than what is kept for traces that run, and enough for all of these.
    await own.command("CONFIG", "SET", "maxmemory", round(used * 1.04))
    refused: list[Exception] = []
    async with tracewire.connect(own.url) as client:

        async def start() -> None:
            try:
                await client.trace("tiny", "hello", detach=True).start()
            except BusFull as error:
                refused.append(error)

        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(start)
        await own.command("CONFIG", "SET", "maxmemory", 0)
    assert len(refused) == 20
    assert await own.queue.waiting("tiny") == 0


async def test_a_dead_letter_whose_new_trace_has_ended_and_is_forgotten(
    own: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    letter = await dead(own)

    async def kept(self: DeadLetters, id_: str) -> bool:
        return False

    monkeypatch.setattr(DeadLetters, "drop", kept)
    async with tracewire.connect(own.url) as client:
        trace = await client.dead_letters.resubmit(letter)
        await own.queue.withdraw("tiny", trace)
        await own.records.forget(trace, "tiny")
        with pytest.raises(tracewire.TraceIdTaken, match="has ended"):
            await client.dead_letters.resubmit(letter)


@pytest.mark.parametrize(
    "ask",
    [
        lambda client, model: client.engines.list(model=model),
        Client.edits,
        lambda client, model: client.watch(model=model),
    ],
)
async def test_a_models_name_that_is_none(client: Client, ask: Callable[..., Any]) -> None:
    for model, error in (("", ValueError), (5, TypeError), ("\udc80", ValueError)):
        with pytest.raises(error, match="model: expected"):
            ask(client, model)
