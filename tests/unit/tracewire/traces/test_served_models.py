"""The models that engines serve, as a client reads them from the registry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

import tracewire
from tests.support.bus_engine import engine_info
from tests.support.redis.proxy import proxy
from tests.support.until import until
from tracewire import Client, UnknownModel
from tracewire_bus.bus import Bus

#: Nothing here takes longer; a test that would hang fails instead.
PATIENCE = 60


async def test_models_lists_what_live_engines_serve(client: Client, engine: Callable[..., Any]) -> None:
    assert await client.models.list() == []
    async with engine(running=2), engine(running=3), engine(model="other", dtype="float32"):
        found = {info.name: info for info in await client.models.list()}
        assert set(found) == {"tiny", "other"}
        assert len(found["tiny"].engines) == 2
        assert (found["tiny"].capacity, found["tiny"].running) == (32, 5)
        assert found["tiny"].layer_count == 4
        assert found["other"].dtype == "float32"
    assert await client.models.list() == []


async def test_a_models_queue_limit_is_the_most_that_an_engine_says(client: Client, engine: Callable[..., Any]) -> None:
    async with engine(queue_limit=5), engine(queue_limit=7):
        assert (await client.models.list())[0].queue_limit == 7
        async with engine():
            assert (await client.models.list())[0].queue_limit == 0


async def test_an_unknown_model_is_refused_at_once_naming_those_that_exist(
    client: Client, engine: Callable[..., Any]
) -> None:
    with pytest.raises(UnknownModel, match="no engine is registered at all"):
        await client.models.get("tiny")
    async with engine() as serving:
        with pytest.raises(UnknownModel, match="no engine serves the model 'tyni'; served now: 'tiny'") as caught:
            await client.models.get("tyni")
        with pytest.raises(UnknownModel, match=r"served now: 'tiny'; did you mean 'tiny'\? .*`tracewire models` lists"):
            await client.models.get("tinny")
        assert caught.value.available == ["tiny"]
        with pytest.raises(UnknownModel):
            async with client.trace("tyni", "hello"):
                pass
        assert serving.taken == []


async def test_a_burst_reads_what_is_old_once(client: Client, engine: Callable[..., Any]) -> None:
    bus = client._session.open_bus()
    asked: list[str] = []
    engines, memory = bus.registry.list, bus.memory.usage

    async def counted_engines() -> Any:
        asked.append("engines")
        return await engines()

    async def counted_memory() -> Any:
        asked.append("memory")
        return await memory()

    bus.registry.list, bus.memory.usage = counted_engines, counted_memory  # type: ignore[method-assign]

    async def start(model: str) -> None:
        try:
            await client.trace(model, "p", detach=True).start()
        except UnknownModel:
            asked.append("unknown")

    async with engine():
        for model in ("tiny", "nobody's"):
            client._session.models.forget()
            bus.memory._left.forget()
            asked.clear()
            async with anyio.create_task_group() as group:
                for _ in range(50):
                    group.start_soon(start, model)
            if model == "tiny":
                assert asked == ["engines", "memory"]
            else:
                # Those that do not find it look once more, together as they come.
                assert asked.count("unknown") == 50
                assert asked.count("engines") < 10


async def test_after_an_outage_a_submission_waits_until_engines_have_registered_again(
    bus: Bus, embedded: str, prefix: str, tmp_path: Path
) -> None:
    """Redis was away for longer than a registration lasts, and comes back without any."""
    async with proxy(embedded, tmp_path) as way, tracewire.connect(way.url, prefix=prefix) as client:
        with pytest.raises(UnknownModel):
            await client.trace("tiny", "hello").start()
        way.away = True
        await way.cut()
        trace = client.trace("tiny", "hello", detach=True)
        own = client._session.open_bus()
        looks = 0
        plain = own.registry.list

        async def counted() -> Any:
            nonlocal looks
            found = await plain()
            looks += 1
            return found

        own.registry.list = counted  # type: ignore[method-assign]
        with anyio.fail_after(PATIENCE):
            async with anyio.create_task_group() as group:
                group.start_soon(trace.start)
                await until(lambda: own.broken_at > 0)
                way.away = False
                # More often than a client looks without an outage.
                await until(lambda: looks > 2)
                await bus.registry.register(engine_info(), ttl_s=600)
        assert await bus.queue.waiting("tiny") == 1


async def test_long_after_an_outage_an_unknown_model_is_refused_at_once(
    embedded: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracewire.traces.served_models._BACK_S", 0.2)
    async with proxy(embedded, tmp_path) as way, tracewire.connect(way.url, prefix=prefix) as client:
        own = client._session.open_bus()
        await way.cut()
        with pytest.raises(UnknownModel):
            await client.trace("tiny", "hello").start()
        await until(lambda: anyio.current_time() - own.broken_at > 0.2)
        looks = 0
        plain = own.registry.list

        async def counted() -> Any:
            nonlocal looks
            looks += 1
            return await plain()

        own.registry.list = counted  # type: ignore[method-assign]
        with pytest.raises(UnknownModel):
            await client.trace("tiny", "hello").start()
        assert looks <= 2
