"""Resources list page after page, as an iterator and as a list."""

from __future__ import annotations

import pytest

import tracewire
from tests.support.bus_engine import BusEngine, engine_info, tiny
from tracewire import UnknownDeadLetter, UnknownEngine
from tracewire_bus.bus import Bus


async def given_up(bus: Bus, number: int, model: str = "tiny") -> None:
    """Put a submission that no engine can read on the dead-letter queue."""
    await bus.command(
        *(
            "XADD",
            bus.keys.dead(),
            "*",
            "model",
            model,
            "entry",
            f"t{number}",
            "reason",
            "unreadable",
            "v",
            "1.1",
            "d",
            b"junk",
        )
    )


async def test_dead_letters_are_listed_page_after_page(
    embedded: str, bus: Bus, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracewire.admin.dead_letters._PAGE", 4)
    for number in range(10):
        await given_up(bus, number, "even" if number % 2 == 0 else "odd")
    async with tracewire.connect(embedded, prefix=prefix) as client:
        letters = client.dead_letters
        everything = [f"t{number}" for number in range(10)]
        assert [letter.trace_id async for letter in letters.list()] == everything
        listing = letters.list()
        assert [letter.trace_id for letter in await listing] == everything
        assert [letter.trace_id for letter in await listing] == everything
        assert [letter.trace_id for letter in await letters.list(limit=5)] == everything[:5]
        assert [letter.trace_id for letter in await letters.list(limit=4)] == everything[:4]
        assert [letter.trace_id for letter in await letters.list(model="odd", limit=3)] == ["t1", "t3", "t5"]
        assert [letter.trace_id for letter in await letters.list(model="odd")] == everything[1::2]
        seventh = (await listing)[6]
        assert [letter.trace_id for letter in await letters.list(after=seventh.id)] == everything[7:]
        assert await letters.get(seventh.id) == seventh
        assert await letters.drop(seventh)
        with pytest.raises(UnknownDeadLetter):
            await letters.get(seventh.id)


async def test_engines_and_models_are_listed_and_got(embedded: str, prefix: str) -> None:
    async with (
        tracewire.connect(embedded, prefix=prefix) as client,
        BusEngine.running(embedded, prefix, tiny, engine_info(engine="e1")),
        BusEngine.running(embedded, prefix, tiny, engine_info("other", engine="e2")),
    ):
        assert [engine.name async for engine in client.engines.list()] == ["e2", "e1"]
        assert [engine.name for engine in await client.engines.list(model="tiny")] == ["e1"]
        assert (await client.engines.get("e2")).model == "other"
        with pytest.raises(UnknownEngine, match="live now: e1, e2"):
            await client.engines.get("e3")
        assert [info.name for info in await client.models.list()] == ["other", "tiny"]
        assert (await client.models.get("tiny")).info == (await client.models.list())[1]


async def test_waiting_for_a_drained_engine_can_be_limited(embedded: str, prefix: str) -> None:
    async with (
        tracewire.connect(embedded, prefix=prefix) as client,
        BusEngine.running(embedded, prefix, tiny, engine_info(engine="e1")),
    ):
        draining = await client.engines.drain("e1")
        with pytest.raises(TimeoutError):
            await draining.wait(timeout=0)
