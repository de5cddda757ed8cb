"""Entries of the queue, while Redis is away and where a part of one is malformed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

import tests.fuzz as fuzz
from tests.support.played_engine import PlayedEngine, adapted
from tests.support.redis.proxy import proxy
from tests.support.served import counted, failure, runs, served, submission
from tests.support.until import until
from tracewire import Client
from tracewire_bus.bus import Bus
from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.packing import pack

PATIENCE = 15


@pytest.mark.usefixtures("registered")
async def test_an_entry_waits_for_a_redis_that_is_away_while_it_is_opened(
    client: Client, embedded: str, prefix: str, tmp_path: Path
) -> None:
    """For longer than the bus is patient."""
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with proxy(embedded, tmp_path) as way, adapted(way.url, prefix, engine) as adapter:
            records, opening = adapter._bus.records, anyio.Event()
            plain = records.open

            async def opened(trace: str, name: str, attempt: int) -> Any:
                way.away = True
                await way.cut()
                try:
                    return await plain(trace, name, attempt)
                finally:
                    way.away = False
                    opening.set()
                    records.open = plain  # type: ignore[method-assign]

            records.open = opened  # type: ignore[method-assign]
            async with client.trace("tiny", "hello", detach=True) as trace:
                await opening.wait()
                await trace.accepted()
                (request,) = engine.requests
                engine.finish(request)
                assert (await trace.result()).text == "x"


@pytest.mark.usefixtures("registered")
async def test_an_entry_that_is_still_being_opened_keeps_no_adapter_from_leaving(
    client: Client, bus: Bus, embedded: str, prefix: str
) -> None:
    """Redis does not take its rejection, say. It waits for the next engine."""
    opening = anyio.Event()
    async with client.trace("tiny", "hello", detach=True):
        with anyio.fail_after(PATIENCE):
            async with adapted(embedded, prefix, PlayedEngine(), last_words_s=0.2) as adapter:

                async def never(*arguments: Any) -> None:
                    opening.set()
                    await anyio.sleep_forever()

                adapter._intake._checked = never  # type: ignore[method-assign,assignment]
                await opening.wait()
                adapter.stop()
                await adapter.ended.wait()
            assert await bus.queue.waiting("tiny") == 1


async def begun(engine: PlayedEngine) -> tuple[str, Any]:
    """The one request that was started."""
    await engine.started.wait()
    ((request, outputs),) = engine.requests.items()
    return request, outputs


@pytest.mark.usefixtures("registered")
async def test_what_names_no_trace_becomes_a_dead_letter(client: Client, bus: Bus, embedded: str, prefix: str) -> None:
    """And what does is answered on its stream. The engine goes on."""
    engine = PlayedEngine()
    for name, data in (("", b"\x00garbage"), ("x" * 1000, b"else"), ("named", b"\xc1")):
        await bus.queue.put("tiny", name, data)
    with anyio.fail_after(PATIENCE):
        async with adapted(embedded, prefix, engine), client.trace("tiny", "hello") as trace:
            request, _ = await begun(engine)

            async def answered() -> bool:
                return await bus.command("EXISTS", bus.keys.events("named")) == 1

            await until(answered)
            (final,) = [event async for event in client.subscribe("named")]
            engine.finish(request)
            assert (await trace.result()).text == "x"

            async def cleared() -> bool:
                return await bus.command("HLEN", bus.keys.queue("tiny", "entries")) == 0

            await until(cleared)
    assert (final.status, final.error.field) == ("rejected", "submission")
    assert [letter.data for letter in await bus.dead_letters.list()] == [b"\x00garbage", b"else"]
    assert await bus.queue.waiting("tiny") == 0


async def test_queue_entries_with_a_malformed_part_are_answered(bus: Bus, embedded: str, prefix: str) -> None:
    keys = [bus.keys.queue("tiny", part) for part in ("entries", "data", "client:raw", "turns", "bell", "state")]
    async with served(bus, embedded, prefix) as (_, client), anyio.create_task_group() as group:

        async def answered(trace: str, place: int) -> None:
            error = await failure(client, trace)
            # Only its schema says what its data is.
            assert error is None if place else error.field == "schema", trace

        for place, value in itertools.product(range(11), [None, "text", -1, 1e300, [1], {}]):
            trace = f"t{place}-{value!r}"
            entry: list[Any] = ["1.1", "1700000000000000", "raw", 0, "", 1, 300, 0, 2, 0, ""]
            entry[place] = value
            await bus.command("HSET", bus.keys.record(trace), "m", "tiny")
            packed, data = msgspec.msgpack.encode(entry), encode(submission(trace))
            await bus.command("EVAL", fuzz._RAW_ENTRY, len(keys), *keys, trace, packed, data)
            group.start_soon(answered, trace, place)
        await runs(client)


@pytest.mark.parametrize("name", ["v", "zn", "t", "l:alpha"])
async def test_a_malformed_record_fails_its_own_trace(name: str, bus: Bus, embedded: str, prefix: str) -> None:
    await bus.command("HSET", bus.keys.record("t"), "m", "tiny", name, b"\xc1 garbage")
    await bus.queue.put("tiny", "t", encode(submission(live=pack({"alpha": 0.5}))))
    async with served(bus, embedded, prefix) as (_, client):
        error = await failure(client, "t")
        assert "in Redis is malformed" in error.message
        assert bus.keys.record("t") in error.message
        await runs(client)
        await counted(client)
