"""Snapshots: streams are trimmed to what follows a state, and who missed events goes on from it."""

from __future__ import annotations

import anyio
import pytest

from tests.support.authors import Author, read, same
from tracewire_bus.bus import Bus, EventsLost, Fenced, Gap
from tracewire_bus.domain.fold import Fold, FoldError
from tracewire_bus.store import snapshots
from tracewire_bus.wire.codec import decode_event, decode_snapshot
from tracewire_bus.wire.messages import Failure, Paused, Restarted, Steered


async def test_a_fold_that_goes_on_from_snapshots_ends_verified(bus: Bus) -> None:
    async with bus.writer() as writer:
        author = Author(bus, writer)
        await author.begin()
        await author.outputs(10)
        await author.write(Steered(attempt=0, seq=0, version=3))
        await author.write(Paused(attempt=0, seq=0, by="me"))
        trimmed = await bus.snapshots.take("t", 1)
        assert trimmed is not None
        assert (trimmed.id, trimmed.entries) == ("1-12", 13)
        stored = await bus.snapshots.read("t")
        assert stored is not None
        fold = Fold()
        fold.resume(decode_snapshot(stored.data))
        same(fold, author)
        # Once more, from the first snapshot on.
        await author.outputs(5)
        trimmed = await bus.snapshots.take("t", 1)
        assert trimmed is not None
        assert (trimmed.id, trimmed.entries) == ("1-17", 5)
        assert await bus.snapshots.take("t", 1) is None
        assert await bus.command("XLEN", bus.keys.events("t")) == 1
        await author.outputs(2)
        await author.end()
    fold, seen = await read(bus, "t")
    assert seen == ["start>1-17", "1-18", "1-19", seen[-1]]
    same(fold, author)


async def test_a_gap_is_seen_exactly(bus: Bus) -> None:
    async with bus.writer() as writer:
        author = Author(bus, writer)
        await author.begin()
        await author.outputs(10)
        before = bus.read("t")
        fold = Fold()
        for _ in range(4):
            item = await anext(before)
            assert not isinstance(item, Gap)
            fold.apply(decode_event(item.data))
        late = bus.read("t", "1-9")
        later = bus.read("t", "1-10")
        await bus.snapshots.take("t", 1)
        await author.outputs(1)
        await author.end()
    # A page had been read ahead.
    assert [item.id async for item in before if not isinstance(item, Gap)][:7] == [f"1-{seq}" for seq in range(4, 11)]
    # The snapshot's own event is there.
    assert [type(item) for item in [item async for item in late]].count(Gap) == 0
    assert [type(item) for item in [item async for item in later]].count(Gap) == 0
    _, seen = await read(bus, "t", "1-3", fold)
    assert seen[:2] == ["1-3>1-10", "1-11"]
    assert [item.until async for item in bus.read("t", "1-8") if isinstance(item, Gap)] == ["1-10"]


async def test_who_waits_while_the_stream_is_trimmed_sees_no_gap(bus: Bus) -> None:
    seen: list[str] = []
    async with bus.writer() as writer, anyio.create_task_group() as group:

        async def follow() -> None:
            seen.extend((await read(bus, "t"))[1])

        group.start_soon(follow)
        author = Author(bus, writer)
        await author.begin()
        for _ in range(5):
            await author.outputs(3)
            while not bus._reader or bus._reader.position(bus.keys.events("t")) != (1, author.seq - 1):
                await anyio.lowlevel.checkpoint()
            await bus.snapshots.take("t", 1)
        await author.end()
    assert seen[:-1] == [f"1-{seq}" for seq in range(16)]


async def test_now_on_a_trimmed_stream_is_after_its_last_event(bus: Bus) -> None:
    async with bus.writer() as writer:
        author = Author(bus, writer)
        await author.begin()
        await author.outputs(4)
        await bus.snapshots.take("t", 1)
        async with bus.read("t", "now") as subscription:
            await author.outputs(1)
            item = await anext(subscription)
            assert not isinstance(item, Gap)
            assert item.id == "1-5"


async def test_a_snapshot_in_chunks(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "CHUNK_BYTES", 100)
    async with bus.writer() as writer:
        author = Author(bus, writer)
        await author.begin()
        await author.outputs(12)
        await bus.snapshots.take("t", 1)
        fields = await bus.command("HLEN", bus.keys.snapshot("t"))
        assert fields > 8
        # What a snapshot that was never made left behind goes with the next.
        await bus.command("HSET", bus.keys.snapshot("t"), "abandoned:0", "x")
        await author.outputs(1)
        await bus.snapshots.take("t", 1)
        names = {name.partition(b":")[0] for name in await bus.command("HKEYS", bus.keys.snapshot("t"))}
        assert len(names) == 6
        await author.end()
    same((await read(bus, "t"))[0], author)


async def test_trimming_by_hand_is_told(bus: Bus) -> None:
    async with bus.writer() as writer:
        author = Author(bus, writer)
        await author.begin()
        await author.outputs(5)
        await bus.command("XTRIM", bus.keys.events("t"), "MINID", "1-4")
        subscription = bus.read("t")
        with pytest.raises(EventsLost, match="1-4") as caught:
            await anext(subscription)
        assert (caught.value.since, caught.value.until) == ("start", "1-4")
        with pytest.raises(EventsLost):
            await anext(subscription)
        with pytest.raises(FoldError):
            await bus.snapshots.take("t", 1)
        # A snapshot that ends before what is there does not help.
        await bus.snapshots._write("t", 1, 2, b"")
        await bus.command("XTRIM", bus.keys.events("t"), "MINID", "1-5")
        items = bus.read("t")
        assert isinstance(await anext(items), Gap)
        with pytest.raises(EventsLost):
            await anext(items)
        await author.end()
    with pytest.raises(EventsLost):
        await anext(bus.read("t", "1-2"))


async def test_an_engine_that_lost_its_claim_neither_replaces_nor_trims(bus: Bus) -> None:
    async with bus.writer() as writer:
        first = Author(bus, writer)
        await first.begin()
        await first.outputs(3)
        await bus.records.open("t", "second", 2)
        assert await bus.snapshots.take("t", 1) is None
        assert await bus.snapshots.read("t") is None
        assert await bus.command("EXISTS", bus.keys.snapshot("t")) == 0
        second = Author(bus, writer, attempt=2)
        await second.write(Restarted(attempt=0, seq=0))
        # Not yet: a stream is never trimmed to where an attempt begins.
        assert await bus.snapshots.take("t", 2) is None
        await second.begin()
        await second.outputs(2)
        with pytest.raises(Fenced):
            await first.outputs(1)
        assert await bus.snapshots.take("t", 1) is None
        trimmed = await bus.snapshots.take("t", 2)
        assert trimmed is not None
        assert (trimmed.id, trimmed.entries) == ("2-3", 4)
        assert await bus.snapshots._write("t", 1, 90, b"old") == b"overtaken"
        assert await bus.snapshots._write("t", 2, 2, b"old") == b"older"
        stored = await bus.snapshots.read("t")
        assert stored is not None
        assert stored.id == "2-3"
        await second.end()
    fold, seen = await read(bus, "t", "1-1")
    assert seen[0] == "1-1>2-3"
    same(fold, second)


async def test_a_restart_makes_an_old_snapshot_void(bus: Bus) -> None:
    async with bus.writer() as writer:
        first = Author(bus, writer)
        await first.begin()
        await first.outputs(3)
        await bus.snapshots.take("t", 1)
        await first.outputs(1)
        second = Author(bus, writer, attempt=2)
        await second.write(Restarted(attempt=0, seq=0))
        await second.begin()
        await second.outputs(2)
        await second.end()
    fold, seen = await read(bus, "t")
    assert seen[:3] == ["start>1-3", "1-4", "2-0"]
    same(fold, second)


async def test_a_snapshot_expires_with_its_trace(embedded: str, prefix: str) -> None:
    async with Bus.open(embedded, prefix=prefix, retention_s=100) as bus, bus.writer() as writer:
        author = Author(bus, writer)
        await author.begin()
        await author.outputs(3)
        await bus.snapshots.take("t", 1)
        assert await bus.command("TTL", bus.keys.snapshot("t")) > 100
        await author.end()
        assert 0 < await bus.command("TTL", bus.keys.snapshot("t")) <= 100
        await bus.command("DEL", bus.keys.events("t"), bus.keys.snapshot("t"))
        assert await bus.snapshots._write("t", 1, 3, b"late") == b"gone"
        assert await bus.command("EXISTS", bus.keys.snapshot("t")) == 0
        # And with one that a third party ends.
        author = Author(bus, writer, "u")
        await bus.records.open("u", "e", 1)
        await author.begin()
        await author.outputs(3)
        await bus.snapshots.take("u", 1)
        assert await bus.records.end("u", "failed", Failure(type="X", message="x"))
        assert 0 < await bus.command("TTL", bus.keys.snapshot("u")) <= 100
        items = [item async for item in bus.read("u", "1-1")]
        assert isinstance(items[0], Gap)
        assert len(items) == 2
