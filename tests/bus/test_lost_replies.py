"""What Redis carried out although its reply was lost is sent again, done once, and told as what it came to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.redis.proxy import Proxy, proxy
from tracewire_bus.bus import Bus
from tracewire_bus.store import edits
from tracewire_bus.store import trace_records as records
from tracewire_bus.store.edits import UnknownEdit, VersionDiffers
from tracewire_bus.store.trace_records import TraceEnded
from tracewire_bus.transport.scripts import Script, with_text
from tracewire_bus.wire.messages import Block, Edit, Invoke, Submission

MODEL = "m"


def edit(name: str, source: str = "pass") -> Edit:
    return Edit(name=name, block=Block(name="f", source=source))


@asynccontextmanager
async def losing(bus: Bus, folder: Path, call: Script | str) -> AsyncIterator[tuple[Bus, Proxy]]:
    """A bus of the same Redis that loses the reply to the next call of a command, or of a script, which Redis knows."""
    if isinstance(call, Script):
        text = with_text(("EVALSHA", call.digest))
        assert text is not None
        await bus.command("SCRIPT", "LOAD", text[1])
    async with proxy(bus.url, folder) as way, Bus.open(way.url, prefix=bus.keys.prefix) as far:
        way.swallow = (call if isinstance(call, str) else call.digest).encode()
        yield far, way
        assert way.swallowed.is_set()


async def test_an_edit_is_installed_once(bus: Bus, tmp_path: Path) -> None:
    version = await bus.edits.install(MODEL, edit("a"))
    async with losing(bus, tmp_path, edits._INSTALL) as (far, _):
        assert await far.edits.install(MODEL, edit("a", "x = 1"), replacing=version) == version + 1
        with pytest.raises(VersionDiffers):
            await far.edits.install(MODEL, edit("a"), replacing=version)
    async with losing(bus, tmp_path, edits._INSTALL) as (far, _):
        assert await far.edits.install(MODEL, edit("b")) == version + 2
    assert await bus.edits.generation(MODEL) == version + 2


async def test_an_edit_that_somebody_has_changed_since_is_not_installed_again(bus: Bus, tmp_path: Path) -> None:
    async with losing(bus, tmp_path, edits._INSTALL) as (far, way):
        way.on_swallow = way.stop
        installing = _started(far.edits.install(MODEL, edit("a", "mine")))
        await way.swallowed.wait()
        other = await bus.edits.install(MODEL, edit("a", "another's"))
        way.go_on()
        assert await installing == other - 1
    (found,) = (await bus.edits.load(MODEL)).edits
    assert found.version == other


async def test_an_edit_is_removed_and_disabled_once(bus: Bus, tmp_path: Path) -> None:
    version = await bus.edits.install(MODEL, edit("a"))
    async with losing(bus, tmp_path, edits._DISABLE) as (far, _):
        assert await far.edits.disable(MODEL, "a", version, "why")
        assert not await far.edits.disable(MODEL, "a", version, "again")
    async with losing(bus, tmp_path, edits._REMOVE) as (far, _):
        assert await far.edits.remove(MODEL, "a", version=version) == version + 2
        with pytest.raises(UnknownEdit):
            await far.edits.remove(MODEL, "a")
    assert await bus.edits.generation(MODEL) == version + 2


@pytest.fixture(params=["waits", "runs"])
async def trace(request: pytest.FixtureRequest, bus: Bus) -> str:
    """A trace that waits, or that an engine runs."""
    await bus.submit(Submission(trace="t", model=MODEL, invokes=[Invoke(prompt="x")]))
    if request.param == "runs":
        await bus.command("SET", bus.keys.engine("e"), "lives")
        await bus.records.open("t", "e")
    return "t"


async def test_a_trace_is_paused_and_resumed_once(bus: Bus, tmp_path: Path, trace: str) -> None:
    for resume in (False, True):
        async with losing(bus, tmp_path, records._PAUSE) as (far, _):
            assert await far.records.pause(trace, by="me", resume=resume)
            assert not await far.records.pause(trace, by="me", resume=resume)
    assert await bus.command("HGET", bus.keys.record(trace), "zn") == b"2"
    orders = await bus.command("XLEN", bus.keys.control(bus.keys.tag(trace), "e"))
    assert orders in (0, 2)


async def test_a_pause_that_somebody_has_ended_since_is_not_made_again(bus: Bus, tmp_path: Path, trace: str) -> None:
    async with losing(bus, tmp_path, records._PAUSE) as (far, way):
        way.on_swallow = way.stop
        pausing = _started(far.records.pause(trace, by="me"))
        await way.swallowed.wait()
        assert await bus.records.pause(trace, by="another", resume=True)
        way.go_on()
        assert await pausing
    assert await bus.command("HGET", bus.keys.record(trace), "z") is None


async def test_who_has_cancelled_a_trace_is_told_so(bus: Bus, tmp_path: Path, trace: str) -> None:
    async with losing(bus, tmp_path, records._CANCEL) as (far, _):
        await far.cancel(trace, by="me")
    if not await bus.records.ended(trace):
        # Its engine ends it.
        assert await bus.command("XLEN", bus.keys.control(bus.keys.tag(trace), "e")) == 1
        assert await bus.records.end(trace, "cancelled", records.cancellation("me", ""))
    with pytest.raises(TraceEnded):
        await bus.cancel(trace, by="another")


async def test_a_dead_letter_that_was_dropped_was_there(bus: Bus, tmp_path: Path) -> None:
    id_ = await bus.command("XADD", bus.keys.dead(), "*", "d", "")
    async with losing(bus, tmp_path, "XDEL") as (far, _):
        assert await far.dead_letters.drop(id_.decode())
        assert not await far.dead_letters.drop(id_.decode())


async def test_a_watch_group_that_was_removed_was_there(bus: Bus, tmp_path: Path) -> None:
    await bus.command("HSET", bus.keys.watch_groups(), "g", "1")
    async with losing(bus, tmp_path, "HDEL") as (far, _):
        assert await far.watch_groups.remove("g")
        assert not await far.watch_groups.remove("g")


def _started(awaitable: Awaitable[Any]) -> asyncio.Future[Any]:
    return asyncio.ensure_future(awaitable)
