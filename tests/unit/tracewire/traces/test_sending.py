"""A submission on its way: its arrays, the rest of it in Redis if the bus refuses it, and the owner of its trace."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import tracewire
from tests.support.bus_engine import BusEngine, Stage, engine_info, tiny
from tests.support.redis.durable import Server, server
from tests.support.until import until
from tracewire import BusFull, Client, Overloaded, TraceRejected
from tracewire_bus.bus import Bus
from tracewire_bus.wire.codec import schema_text

PATIENCE = 60
#: Bytes of an array that travels in several chunks.
LARGE = 3_000_000


@tracewire.intervention
def adds(model: Any, tracer: Any, live: Any, direction: Any = None) -> None:
    """A block with a large variable."""
    for _ in tracer.iter[:]:
        model.model.layers[1].output[0] += direction


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[Server]:
    """A server of the test's own."""
    async with server(tmp_path / "redis") as one:
        yield one


async def _chunks(bus: Bus, trace: str) -> int:
    return int(await bus.command("HLEN", bus.keys.blobs(trace)))


async def test_a_submission_that_finds_the_queue_full_leaves_no_arrays(client: Client, bus: Bus) -> None:
    await bus.registry.register(engine_info(queue_limit=1, schema=schema_text()), ttl_s=600)
    async with client.trace("tiny", "first"):
        large = client.trace("tiny", "x", adds(direction=np.ones(LARGE, np.uint8)))
        for _ in range(2):
            with pytest.raises(Overloaded):
                await large.start()
            assert await _chunks(bus, large.id) == 0
        assert not await bus.exists(large.id)
    async with large:
        assert await _chunks(bus, large.id) == 3


async def test_a_submission_for_which_redis_has_no_room_leaves_no_arrays(redis: Server) -> None:
    async with Bus.open(redis.url) as bus, tracewire.connect(redis.url) as client:
        await bus.registry.register(engine_info(schema=schema_text()), ttl_s=600)
        _, used, _ = await bus.memory.usage()
        await bus.command("CONFIG", "SET", "maxmemory", used + 6_000_000)
        large = client.trace("tiny", "x", adds(direction=np.ones(5 * LARGE, np.uint8)))
        with pytest.raises(BusFull):
            await large.start()
        assert await _chunks(bus, large.id) == 0


async def test_from_the_reserve_on_a_client_sends_no_arrays(redis: Server) -> None:
    async with Bus.open(redis.url) as bus:
        await bus.registry.register(engine_info(schema=schema_text()), ttl_s=600)
        await bus.command("SETRANGE", "ballast", 40_000_000, "x")
        _, used, _ = await bus.memory.usage()
        await bus.command("CONFIG", "SET", "maxmemory", 100 * used // 97)
        await bus.command("CONFIG", "RESETSTAT")
        async with tracewire.connect(redis.url) as client:
            with pytest.raises(BusFull, match="kept for running traces"):
                await client.trace("tiny", "x", adds(direction=np.ones(LARGE, np.uint8))).start()
        assert b"cmdstat_hset" not in bytes(await bus.command("INFO", "commandstats"))


async def test_a_submission_that_is_larger_than_the_engines_take_is_rejected(client: Client, bus: Bus) -> None:
    await bus.registry.register(engine_info(schema=schema_text()), ttl_s=600)
    await bus.command("HSET", bus.keys.queue("tiny", "state"), "bytes", 100_000)
    trace = client.trace("tiny", "x" * 200_000)
    with pytest.raises(TraceRejected, match="a submission has at most 100000 bytes, got 2") as caught:
        await trace.start()
    assert caught.value.field == "submission"
    assert "submission-bytes" in str(caught.value)
    # Nothing is left of it that says that it waits.
    assert not await bus.exists(trace.id)
    assert await bus.queue.waiting("tiny") == 0


async def test_leaving_a_trace_that_another_submission_has_made_does_not_cancel_it(
    client: Client, engine: Callable[..., Any], bus: Bus, redis_url: str, prefix: str
) -> None:
    going = anyio.Event()

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output("one")
        await going.wait()
        await stage.output(" two")
        await stage.final()

    async with engine(script), tracewire.connect(redis_url, prefix=prefix) as other:
        async with client.trace("tiny", "x", trace_id="mine", detach=True) as own:
            await own.accepted()
        for again in (client, other):
            with anyio.fail_after(PATIENCE):
                async with again.trace("tiny", "x", trace_id="mine") as trace:
                    assert (await anext(trace.outputs())).text == "one"
        going.set()
        with anyio.fail_after(PATIENCE):
            assert await client.subscribe("mine").until_done() == "finished"


async def test_what_redis_has_lost_is_submitted_again_although_another_trace_cannot_be(
    redis: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tracewire.traces.presence.GUARD_POLL_S", 0.05)
    async with tracewire.connect(redis.url) as client, Bus.open(redis.url) as bus:
        await bus.registry.register(engine_info(schema=schema_text()), ttl_s=600)
        await client.models.get("tiny")
        since = redis.written
        refused = client.trace("tiny", "x" * 2000)
        await refused.start()
        kept = client.trace("tiny", "y")
        await kept.start()
        redis.kill()
        redis.forget(since)
        await redis.start()
        # Before the client comes to it: the engines that are there now take less.
        await bus.command("HSET", bus.keys.queue("tiny", "state"), "bytes", 1000)

        async def is_back() -> bool:
            return await bus.exists(kept.id)

        await until(is_back)
        assert not await bus.exists(refused.id)
        assert "cannot be submitted again" in caplog.text
        async with BusEngine.running(redis.url, bus.keys.prefix, tiny, engine_info()):
            assert (await kept.result()).status == "finished"


async def test_declared_arrays_travel_beside_a_submission_that_is_submitted_again(
    redis: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracewire.traces.presence.GUARD_POLL_S", 0.05)
    async with tracewire.connect(redis.url) as client, Bus.open(redis.url) as bus:
        info = engine_info(hidden_size=64, schema=schema_text())
        await bus.registry.register(info, ttl_s=600)
        await client.models.get("tiny")
        since = redis.written
        weight = np.ones((128, 64), np.float32)
        trace = client.trace("tiny", "x", interventions=[tracewire.Probe("p", "residual(1)", weight=weight)])
        await trace.start()
        (first,) = await bus.queue.take("tiny", "one", 1, 0)
        await redis.lose(since)

        taken: list[Any] = []

        async def is_back() -> bool:
            taken.extend(await bus.queue.take("tiny", "one", 1, 0))
            return bool(taken)

        await until(is_back)
        (again,) = taken
        assert len(first.fields[b"d"]) == len(again.fields[b"d"]) < weight.nbytes
        assert await bus.command("KEYS", bus.keys.vector("*"))
        await trace.aclose()
