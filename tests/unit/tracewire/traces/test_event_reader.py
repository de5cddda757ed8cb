"""Entries of a stream become events; what is missing, newer or malformed is an error of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import tests.fuzz as fuzz
import tracewire
from tests.support.bus_engine import Stage
from tests.support.clients import collected
from tracewire import BrokenStream, Client, EventsLost
from tracewire_bus.bus import Bus
from tracewire_bus.wire import messages
from tracewire_bus.wire.codec import encode


async def test_a_gap_in_the_events_is_an_error(client: Client, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        stage.seq += 1
        # The client, which has found the gap, may cancel the trace before the script goes on. Its end follows the gap.
        stage.fold.seq = stage.seq
        await stage.append(tracewire_output(stage))

    async with engine(script), client.trace("tiny", "hello") as trace:
        with pytest.raises(EventsLost, match=r"after .1-0. and before 1-2"):
            await trace.result()


def tracewire_output(stage: Stage) -> bytes:

    return encode(messages.DecodedOutput(attempt=stage.attempt, seq=stage.seq, token_ids=[1], text="x", deltas=[[]]))


async def test_events_of_a_newer_version(client: Client, engine: Callable[..., Any], redis_url: str) -> None:

    async def unknown(stage: Stage) -> None:
        await stage.accept()
        await stage.append(msgspec.msgpack.encode(["weather", 1, 1, True]))
        stage.fold.seq += 1
        await stage.save("one", {"x": 1})
        await stage.final()

    async def garbage(stage: Stage) -> None:
        await stage.accept()
        await stage.append(b"\xc1 garbage")

    async with engine(unknown):
        async with client.trace("tiny", "hello") as trace:
            assert (await trace.result()).saves == {"x": [1]}
        kinds = [type(event).__name__ for event in await collected(client.subscribe(trace.id))]
        assert kinds == ["Accepted", "Output", "Final"]
        assert (await client.get_state(trace.id)).saves == {"x": [1]}
    async with engine(garbage), client.trace("tiny", "hello") as trace:
        with pytest.raises(BrokenStream, match="event 1-1 cannot be read"):
            await trace.result()


async def test_an_entry_of_a_newer_major_schema(
    client: Client, engine: Callable[..., Any], redis_url: str, prefix: str
) -> None:
    async def script(stage: Stage) -> None:
        async with Bus.open(redis_url, prefix=prefix) as bus:
            await bus.command("XADD", bus.keys.events(stage.trace), "1-0", "v", "3.0", "d", "?")

    async with engine(script), client.trace("tiny", "hello") as trace:
        with pytest.raises(BrokenStream, match=r"schema 3\.0"):
            await trace.accepted()


async def test_a_restart_is_an_item_and_the_fold_starts_over(client: Client, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("lost", {"x": "lost"})
        await stage.restart("its engine died")
        await stage.accept(engine="another")
        await stage.save("kept", {"x": "kept"})
        await stage.final()

    async with engine(script), client.trace("tiny", "hello") as trace:
        items = await collected(trace)
        result = await trace.result()
        assert (await trace.accepted()).engine == "another"
        assert [type(item).__name__ for item in items] == ["Output", "Restarted", "Output"]
        assert items[1].reason == "its engine died"
        assert [items[0].id, items[2].id] == ["1-1", "2-2"]
        assert (result.text, result.saves, result.attempt) == ("kept", {"x": ["kept"]}, 2)
        assert (await client.get_state(trace.id)).saves == {"x": ["kept"]}


async def test_a_malformed_event_is_the_consumers_error_of_its_own(bus: Bus, embedded: str, prefix: str) -> None:
    async with tracewire.connect(embedded, prefix=prefix) as client:
        assert await fuzz.consume(client, bus, 3, 300) == []
        # A path that no dict takes.
        step = [[["s", [["a"]], 1]]]
        event = ["o", 1, 0, 0, 0, 0, [1], "a", 0.0, None, None, None, step]
        await bus.command("HSET", bus.keys.record("p"), "m", "tiny")
        await bus.command("XADD", bus.keys.events("p"), "1-0", "v", "1.1", "d", msgspec.msgpack.encode(event))
        async with client.subscribe("p") as events:
            with pytest.raises(tracewire.BrokenStream):
                _ = (await anext(events)).delta
