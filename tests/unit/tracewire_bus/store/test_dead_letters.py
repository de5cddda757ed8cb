"""Entries that no engine could answer are kept once, as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.lost_replies import losing
from tests.support.queue import left_behind
from tests.support.redis.durable import server
from tests.support.suspects import suspects
from tracewire_bus.bus import Bus, BusError
from tracewire_bus.wire.messages import Failure


async def test_a_dead_letter_that_was_dropped_was_there(bus: Bus, tmp_path: Path) -> None:
    id_ = await bus.command("XADD", bus.keys.dead(), "*", "d", "")
    async with losing(bus, tmp_path, "XDEL") as (far, _):
        assert await far.dead_letters.drop(id_.decode())
        assert not await far.dead_letters.drop(id_.decode())


async def test_what_cannot_be_answered_is_kept_as_it_was(bus: Bus) -> None:
    await bus.queue.put("demo", "\x00", b"\x00garbage", schema="?")
    (taken,) = await bus.queue.take("demo", "e", 1, 0)
    assert len(await bus.dead_letters.list()) == 0
    await bus.queue.dead_letter("demo", taken, "it names no trace")
    assert len(await bus.dead_letters.list()) == 1
    assert await left_behind(bus) == {"state", "engine:e", "holders"}
    ((_, flat),) = await bus.command("XRANGE", bus.keys.dead(), "-", "+")
    assert dict(zip(flat[::2], flat[1::2], strict=True)) == {
        b"model": b"demo",
        b"entry": b"\x00",
        b"reason": b"it names no trace",
        b"v": b"?",
        b"t": b"\x00",
        b"d": b"\x00garbage",
    }


@pytest.mark.parametrize("crash", ["before the letter", "before its entry is settled"])
async def test_a_crash_on_the_way_to_a_dead_letter_leaves_one(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    class Crash(Exception):
        pass

    async def crashes(*_: Any, **__: Any) -> None:
        raise Crash

    await suspects(bus, "a")
    await bus.queue.take("tiny", "e", 1, 1)
    await bus.queue.put_back("tiny", "e", "it was lost again", lost=True)
    with monkeypatch.context() as patched:
        patched.setattr(bus.queue, "dead_letter" if crash == "before the letter" else "done", crashes)
        for _ in range(2):
            with pytest.raises(Crash):
                await bus.recovery("tiny").finish_given_up()
    assert await bus.records.ended("a")
    await bus.recovery("tiny").finish_given_up()
    (letter,) = await bus.dead_letters.list()
    assert (letter.trace, letter.data) == ("a", b"d")
    assert "it was lost again" in letter.reason
    assert await bus.queue.given_up("tiny") == []
    # An operator who has seen to it does not find it again.
    await bus.dead_letters.drop(letter.id)
    await bus.recovery("tiny").finish_given_up()
    assert len(await bus.dead_letters.list()) == 0


async def test_what_had_ended_otherwise_is_no_dead_letter(bus: Bus) -> None:
    """Its engine was lost between its end and its entry."""
    await suspects(bus, "a")
    await bus.queue.take("tiny", "e", 1, 1)
    await bus.records.end("a", "failed", Failure(type="BlockError", message="its block failed"))
    await bus.queue.put_back("tiny", "e", "it was lost again", lost=True)
    await bus.recovery("tiny").finish_given_up()
    assert len(await bus.dead_letters.list()) == 0
    assert await bus.queue.given_up("tiny") == []


async def test_a_dead_letter_fits_into_a_redis_that_is_full(tmp_path: Path) -> None:
    async with server(tmp_path / "redis") as redis, Bus.open(redis.url, patience_s=0.5) as bus:
        await suspects(bus, "a")
        await bus.queue.take("tiny", "e", 1, 1)
        await bus.queue.put_back("tiny", "e", "it was lost again", lost=True)
        await bus.command("CONFIG", "SET", "maxmemory", 1)
        with pytest.raises(BusError):
            await bus.queue.put("tiny", "b", b"d")
        await bus.recovery("tiny").finish_given_up()
        assert len(await bus.dead_letters.list()) == 1
