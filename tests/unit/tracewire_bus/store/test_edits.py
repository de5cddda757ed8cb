"""Standing interventions on the bus: installed, replaced and removed as a whole, followed; their streams bounded."""

from __future__ import annotations

from pathlib import Path

import anyio
import msgspec
import pytest

from tests.support.lost_replies import losing
from tests.support.tasks import started
from tracewire_bus.bus import Bus
from tracewire_bus.store import edits
from tracewire_bus.store import edits as module
from tracewire_bus.store.edits import EditsFull, UnknownEdit, VersionDiffers, is_edit_name, selected
from tracewire_bus.transport.errors import BusError
from tracewire_bus.transport.loops import shielded
from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.messages import Block, Edit, EditRecord

MODEL = "m"


def edit(name: str, source: str = "pass", **more: object) -> Edit:
    return Edit(name=name, block=Block(name="f", source=source), **more)


async def names(bus: Bus) -> list[str]:
    return [one.name for one in (await bus.edits.load(MODEL)).edits]


async def test_a_version_is_the_number_of_the_change(bus: Bus) -> None:
    assert await bus.edits.generation(MODEL) == 0
    assert await bus.edits.install(MODEL, edit("a")) == 1
    assert await bus.edits.install(MODEL, edit("b")) == 2
    assert await bus.edits.remove(MODEL, "a") == 3
    found = await bus.edits.load(MODEL)
    assert (found.generation, [(one.name, one.version) for one in found.edits]) == (3, [("b", 2)])
    assert await bus.edits.load("another") == module.EditSet(0, ())


async def test_a_replaced_edit_keeps_its_place(bus: Bus) -> None:
    for name in ("first", "second", "third"):
        await bus.edits.install(MODEL, edit(name))
    await bus.edits.install(MODEL, edit("first", "x = 1"))
    assert await names(bus) == ["first", "second", "third"]
    await bus.edits.remove(MODEL, "first")
    await bus.edits.install(MODEL, edit("first"))
    assert await names(bus) == ["second", "third", "first"]


async def test_only_the_version_that_is_meant_is_replaced_or_removed(bus: Bus) -> None:
    version = await bus.edits.install(MODEL, edit("a"), replacing=0)
    with pytest.raises(VersionDiffers) as refused:
        await bus.edits.install(MODEL, edit("a", "x = 1"), replacing=0)
    assert refused.value.version == version
    with pytest.raises(VersionDiffers, match="there is no edit 'b'"):
        await bus.edits.install(MODEL, edit("b"), replacing=7)
    with pytest.raises(UnknownEdit):
        await bus.edits.remove(MODEL, "a", version=version + 1)
    assert await bus.edits.generation(MODEL) == version, "what was refused changed something"
    again = await bus.edits.install(MODEL, edit("a", "x = 1"), replacing=version)
    (one,) = (await bus.edits.load(MODEL)).edits
    assert one.version == again
    assert one.edit is not None
    assert one.edit.block is not None
    assert one.edit.block.source == "x = 1"
    await bus.edits.remove(MODEL, "a", version=again)
    with pytest.raises(UnknownEdit):
        await bus.edits.remove(MODEL, "a")


async def test_a_disabled_edit_stays_so_until_it_is_installed_anew(bus: Bus) -> None:
    version = await bus.edits.install(MODEL, edit("a"))
    assert not await bus.edits.disable(MODEL, "a", version + 1, "another version")
    assert await bus.edits.disable(MODEL, "a", version, "it raised")
    assert not await bus.edits.disable(MODEL, "a", version, "again")
    assert [one.disabled for one in (await bus.edits.load(MODEL)).edits] == ["it raised"]
    assert await bus.edits.generation(MODEL) == version + 1
    await bus.edits.install(MODEL, edit("a"))
    assert [one.disabled for one in (await bus.edits.load(MODEL)).edits] == [""]


async def test_there_are_not_too_many_and_none_is_too_large(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_EDITS", 2)
    monkeypatch.setattr(module, "EDIT_BYTES", 2000)
    await bus.edits.install(MODEL, edit("a"))
    await bus.edits.install(MODEL, edit("b"))
    with pytest.raises(EditsFull, match="has 2 edits"):
        await bus.edits.install(MODEL, edit("c"))
    await bus.edits.install(MODEL, edit("b", "x = 2"))
    with pytest.raises(BusError, match="may take 2000"):
        await bus.edits.install(MODEL, edit("b", "x" * 2000))
    assert await names(bus) == ["a", "b"]


async def test_what_cannot_be_read_is_named_and_the_others_are_read(bus: Bus) -> None:
    for name in ("good", "newer", "broken", "other"):
        await bus.edits.install(MODEL, edit(name))
    about, entries = bus.keys.edits(MODEL, "about"), bus.keys.edits(MODEL, "entries")
    place = (await bus.command("HGET", about, "newer")).rpartition(b" ")[0]
    await bus.command("HSET", about, "newer", place + b" 99.0")
    await bus.command("HSET", entries, "broken", b"\xc1")
    await bus.command("HSET", entries, "other", encode(edit("good")))
    found = {one.name: one for one in (await bus.edits.load(MODEL)).edits}
    assert found["good"].edit == edit("good")
    assert "99.0" in found["newer"].problem
    assert "cannot be read" in found["broken"].problem
    assert "'other'" in found["other"].problem
    assert [found[name].edit for name in ("newer", "broken", "other")] == [None] * 3


async def test_who_follows_is_woken_by_each_change(bus: Bus) -> None:
    changes = bus.edits.changes(MODEL)
    try:
        await bus.edits.install(MODEL, edit("a"))
        # One that was made before is not missed either.
        await changes.wait(60_000)
        async with anyio.create_task_group() as group:
            group.start_soon(bus.edits.remove, MODEL, "a")
            with anyio.fail_after(30):
                await changes.wait(60_000)
        await changes.wait(1)
    finally:
        await changes.aclose()


async def test_records_come_in_order_from_where_one_likes(bus: Bus) -> None:
    async def tell(number: int) -> None:
        record = EditRecord(edit="a", version=1, engine="e", request=f"r{number}")
        await bus.edits.publish(MODEL, "a", encode(record))

    await tell(0)
    async with bus.edit_records(MODEL, "a") as now, bus.edit_records(MODEL, "a", "start") as start:
        await tell(1)
        await tell(2)
        assert [(await anext(now))[1].request for _ in range(2)] == ["r1", "r2"]
        first, record = await anext(start)
        assert record.request == "r0"
        async with bus.edit_records(MODEL, "a", first) as behind:
            assert (await anext(behind))[1].request == "r1"
    with pytest.raises(anyio.ClosedResourceError):
        await anext(now)
    with pytest.raises(ValueError):
        bus.edit_records(MODEL, "a", "yesterday")


async def test_an_unreadable_record_is_passed_over(bus: Bus) -> None:
    await bus.edits.publish(MODEL, "a", b"\xc1")
    await bus.edits.publish(MODEL, "a", encode(EditRecord(edit="a", version=1, engine="e", request="r")))
    async with bus.edit_records(MODEL, "a", "start") as records:
        assert (await anext(records))[1].request == "r"


async def test_a_stream_of_records_is_bounded_in_bytes_and_goes(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STREAM_BYTES", 10_000)
    for number in range(50):
        raw = msgspec.Raw(msgspec.msgpack.encode([["x" * 1000]]))
        record = EditRecord(edit="a", version=1, engine="e", request=f"r{number}", deltas=raw)
        await bus.edits.publish(MODEL, "a", encode(record))
    key = bus.keys.edit_saves(MODEL, "a")
    entries = await bus.command("XRANGE", key, "-", "+")
    assert 5 <= len(entries) <= 10
    fields = [dict(zip(flat[::2], flat[1::2], strict=True)) for _, flat in entries]
    held = sum(int(one[b"n"]) for one in fields)
    assert int(await bus.command("HGET", bus.keys.edit_sizes(MODEL), "a")) == held <= 10_000
    assert 0 < await bus.command("TTL", key) <= module.KEEP_S
    # One that is larger than all may take is kept, alone.
    await bus.edits.publish(MODEL, "a", b"x" * 20_000)
    assert len(await bus.command("XRANGE", key, "-", "+")) == 1


async def test_what_an_expired_stream_held_counts_no_more(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STREAM_BYTES", 10_000)
    key, sizes = bus.keys.edit_saves(MODEL, "a"), bus.keys.edit_sizes(MODEL)
    for _ in range(9):
        await bus.edits.publish(MODEL, "a", b"x" * 800)
    # As it does a day after its last entry, while another edit's entries keep the sizes.
    await bus.command("PEXPIRE", key, 0)
    await bus.edits.publish(MODEL, "b", b"x" * 800)
    for number in range(9):
        await bus.edits.publish(MODEL, "a", b"x" * 800)
        assert int(await bus.command("HGET", sizes, "a")) == 1000 * (number + 1)
    assert await bus.command("XLEN", key) == 9


@pytest.mark.parametrize(
    ("scope", "asked", "runs"),
    [
        ("all", None, True),
        ("all", [], True),
        ("all", ["b"], True),
        ("default", None, True),
        ("default", [], False),
        ("default", ["b"], False),
        ("default", ["a"], True),
        ("asked", None, False),
        ("asked", [], False),
        ("asked", ["b", "a"], True),
    ],
)
def test_what_runs_on_a_request(scope: str, asked: list[str] | None, runs: bool) -> None:
    assert selected(scope, "a", asked) is runs


@pytest.mark.parametrize("name", ["a", "A.b-c_d", "0", "x" * 64])
def test_names(name: str) -> None:
    assert is_edit_name(name)


@pytest.mark.parametrize("name", ["", "a/b", ".a", "a b", "x" * 65, "é", "a\n"])
def test_what_is_no_name(name: str) -> None:
    assert not is_edit_name(name)


def edit_of(name: str, source: str = "pass") -> Edit:
    return Edit(name=name, block=Block(name="f", source=source))


async def test_an_edit_is_installed_once(bus: Bus, tmp_path: Path) -> None:
    version = await bus.edits.install(MODEL, edit_of("a"))
    async with losing(bus, tmp_path, edits._INSTALL) as (far, _):
        assert await far.edits.install(MODEL, edit_of("a", "x = 1"), replacing=version) == version + 1
        with pytest.raises(VersionDiffers):
            await far.edits.install(MODEL, edit_of("a"), replacing=version)
    async with losing(bus, tmp_path, edits._INSTALL) as (far, _):
        assert await far.edits.install(MODEL, edit_of("b")) == version + 2
    assert await bus.edits.generation(MODEL) == version + 2


async def test_an_edit_that_somebody_has_changed_since_is_not_installed_again(bus: Bus, tmp_path: Path) -> None:
    async with losing(bus, tmp_path, edits._INSTALL) as (far, way):
        way.on_swallow = way.stop
        installing = started(far.edits.install(MODEL, edit_of("a", "mine")))
        await way.swallowed.wait()
        other = await bus.edits.install(MODEL, edit_of("a", "another's"))
        way.go_on()
        assert await shielded(installing) == other - 1
    (found,) = (await bus.edits.load(MODEL)).edits
    assert found.version == other


async def test_an_edit_is_removed_and_disabled_once(bus: Bus, tmp_path: Path) -> None:
    version = await bus.edits.install(MODEL, edit_of("a"))
    async with losing(bus, tmp_path, edits._DISABLE) as (far, _):
        assert await far.edits.disable(MODEL, "a", version, "why")
        assert not await far.edits.disable(MODEL, "a", version, "again")
    async with losing(bus, tmp_path, edits._REMOVE) as (far, _):
        assert await far.edits.remove(MODEL, "a", version=version) == version + 2
        with pytest.raises(UnknownEdit):
            await far.edits.remove(MODEL, "a")
    assert await bus.edits.generation(MODEL) == version + 2
