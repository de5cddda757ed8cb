"""What edits leave waits for a Redis that is away, up to a bound; nobody waits for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from tests.support.bus_engine import engine_info
from tests.support.redis.durable import server
from tests.support.served import counted, runs, served
from tests.support.standing_edits import raised, standing, told, went_well
from tracewire_bus.bus import Bus
from tracewire_bus.domain.intervention_checks import normalize
from tracewire_bus.store.edits import Edits, EditSet
from tracewire_bus.transport.errors import BusError, BusUnavailable
from tracewire_bus.wire.messages import Block, Edit, Steer
from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.adapter import standing_edits as module
from tracewire_engine.adapter.audit import Audit
from tracewire_engine.adapter.engine_api import Rejection


async def test_what_is_told_waits_for_redis_and_is_told_in_order(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_MS", 1)
    edits = await standing(bus)
    chosen = edits.choose(None)
    whole, away = Edits.publish, 3

    async def tell(self: Edits, model: str, edit: str, record: bytes) -> None:
        nonlocal away
        if away:
            away -= 1
            raise BusUnavailable("away")
        if b"no 1" in record:
            raise BusError("refused")
        await whole(self, model, edit, record)

    monkeypatch.setattr(Edits, "publish", tell)
    async with anyio.create_task_group() as group:
        group.start_soon(edits.publish)
        for number in range(4):
            edits.count_end(chosen, raised(number), trace=f"t{number}")
        with anyio.fail_after(30):
            await edits.flushed()
        group.cancel_scope.cancel()
    # What Redis refuses is lost, alone.
    assert await told(bus, 3) == ["r0", "r2", "r3"]


async def test_what_redis_refuses_to_disable_holds_up_no_record(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it given up: as many failures more ask again."""
    monkeypatch.setattr(module, "_LOOK_MS", 1)
    edits = await standing(bus, max_failures=1)
    chosen = edits.choose(None)
    whole, refusals = Edits.disable, 1

    async def disable(self: Edits, *arguments: Any) -> bool:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise BusError("refused")
        return await whole(self, *arguments)

    monkeypatch.setattr(Edits, "disable", disable)
    async with anyio.create_task_group() as group:
        group.start_soon(edits.publish)
        with anyio.fail_after(30):
            edits.count_end(chosen, raised(0), trace="t0")
            await edits.flushed()
            assert await told(bus, 1) == ["r0"]
            assert not (await bus.edits.load("tiny")).edits[0].disabled
            edits.count_end(chosen, raised(1), trace="t1")
            await edits.flushed()
            assert (await bus.edits.load("tiny")).edits[0].disabled
        group.cancel_scope.cancel()


async def test_of_too_many_the_oldest_are_dropped(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WAITING_BYTES", 1000)
    edits = await standing(bus, max_failures=0)
    chosen = edits.choose(None)
    for number in range(100):
        edits.count_end(chosen, raised(number), trace="t")
    assert edits._waiting <= 1000
    async with anyio.create_task_group() as group:
        group.start_soon(edits.publish)
        with anyio.fail_after(30):
            await edits.flushed()
        group.cancel_scope.cancel()
    kept = await bus.command("XLEN", bus.keys.edit_saves("tiny", "a"))
    assert 2 <= kept < 100
    assert await told(bus, kept) == [f"r{number}" for number in range(100 - kept, 100)]


async def test_one_that_raised_too_often_in_a_row_is_disabled(bus: Bus) -> None:
    edits = await standing(bus, max_failures=3)
    chosen = edits.choose(None)
    async with anyio.create_task_group() as group:
        group.start_soon(edits.publish)
        for number, record in enumerate([raised, raised, went_well, raised, raised]):
            edits.count_end(chosen, record(number), trace="t")
        with anyio.fail_after(30):
            await edits.flushed()
        await edits.refresh()
        assert edits.choose(None).versions == chosen.versions
        edits.count_end(chosen, raised(5), trace="t")
        with anyio.fail_after(30):
            await edits.flushed()
        group.cancel_scope.cancel()
    await edits.refresh()
    assert not edits.choose(None)
    with pytest.raises(Rejection, match="it is disabled: it raised on 3 requests of engine e in a row"):
        edits.choose(["a"])


def _reported(number: int) -> Any:
    """What a host reports, or a block in it."""
    record = raised(number)
    record.hosted = True
    return record


@pytest.mark.parametrize(
    ("tenants", "disabled"),
    [
        (["blue"] * 8, False),
        (["blue", "blue", "red"], True),
        (["blue", "blue", "blue", "red"], True),
        ([""] * 3, True),
        (["blue", "blue"], False),
    ],
)
async def test_the_hosts_of_one_tenant_alone_disable_no_edit(bus: Bus, tenants: list[str], disabled: bool) -> None:
    edits = await standing(bus, max_failures=3)
    chosen = edits.choose(None)
    for number, tenant in enumerate(tenants):
        edits.count_end(chosen, _reported(number), trace=f"t{number}", tenant=tenant)
    assert [name for name, *_ in edits._disabling] == ["a"] * disabled
    # What the worker itself saw counts whatever the tenant.
    for number in range(3):
        edits.count_end(chosen, raised(number), trace=f"t{number}", tenant="blue")
    assert [name for name, *_ in edits._disabling] == ["a"]


async def test_a_host_cannot_say_that_an_edit_without_a_block_raised(bus: Bus) -> None:
    edits = await standing(bus, max_failures=1)
    chosen = edits.choose(None)
    chosen.edits = tuple(msgspec.structs.replace(edit, block=None) for edit in chosen.edits)
    edits.count_end(chosen, _reported(0), trace="t")
    assert not edits._disabling
    assert edits._info.edit_failures == {}


@pytest.mark.parametrize("part", ["about", "entries", "disabled", "state"])
async def test_garbage_among_the_edits_ends_no_engine(part: str, bus: Bus, embedded: str, prefix: str) -> None:
    key = bus.keys.edits("tiny", part)
    await bus.command("HSET", key, "generation", b"\xff garbage", b"\xfe", b"1", "name", "x y z", "more", "1 2 3")
    async with served(bus, embedded, prefix) as (_, client):
        await runs(client)
        if part in ("about", "state"):
            await counted(client)


async def test_failures_of_each_edit_are_counted_for_the_registry(bus: Bus) -> None:
    edits = await standing(bus)
    chosen, info = edits.choose(None), edits._info
    for number in range(2):
        edits.count_end(chosen, raised(number))
    edits.count_end(chosen, went_well(2))
    edits.count_end(chosen, raised(3))
    assert list(info.edit_failures.values()) == [3]
    # Of an edit that was removed nothing is left.
    await edits.take(EditSet(info.edits + 1, ()))
    assert info.edit_failures == {}


async def test_an_edit_with_a_reference_in_place_of_an_array_does_not_run(bus: Bus) -> None:
    """Nobody would fetch it for the workers."""
    edits = await standing(bus)
    (steer,) = normalize([Steer("residual(0)", ArrayRef("float32", (8,), bytes(16), f"vector-{bytes(16).hex()}"))])
    await bus.edits.install("tiny", Edit(name="a", interventions=[steer]))
    await edits.refresh()
    with pytest.raises(Rejection, match=r"interventions\[0\]\.vector: expected an array"):
        edits.choose(["a"])


async def test_a_change_with_the_number_of_a_lost_one_is_read(tmp_path: Path) -> None:
    """Redis has lost an edit, and gives its number to the next one."""
    async with server(tmp_path / "redis") as redis, Bus.open(redis.url) as bus:
        written = redis.written
        edits = await standing(bus)
        audit = edits._audit = Audit(bus, engine_info("tiny", "e"), 10)
        await redis.lose(written)
        assert await bus.edits.install("tiny", Edit(name="a", block=Block(name="f", source="x = 1"))) == 1
        await edits.refresh()
        (runs,) = edits.choose(None).edits
        assert (runs.name, runs.version) == ("a", 1)
        assert runs.block is not None
        assert b"x = 1" in bytes(runs.block.block)
        assert [entry.name for entry in audit._entries] == ["a"]
        # Without a change, nothing is read again.
        chosen = edits.choose(None)
        await edits.refresh()
        assert edits.choose(None) is chosen
