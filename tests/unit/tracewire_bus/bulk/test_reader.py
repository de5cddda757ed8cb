"""Ranges are read from the folder on this host, compared with their digests, and missed with a reason."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from tests.support.stepping import PATIENCE
from tracewire_bus.bulk import reader, segments
from tracewire_bus.bulk.reader import BulkMissing
from tracewire_bus.bulk.segments import Limit, Segment, SegmentFolder, read_range
from tracewire_bus.bulk.stores import StorePlace
from tracewire_bus.bus import Bus
from tracewire_bus.wire.bulk_ranges import BulkRange, bulk_digest
from tracewire_bus.wire.pieces import Pieces

DATA = bytes(range(256)) * 100


@pytest.fixture
def segment(tmp_path: Path) -> Segment:
    return SegmentFolder.create(tmp_path, "bus", Limit(1 << 30)).open("t")


def written(segment: Segment, data: bytes = DATA) -> BulkRange:
    """A range with some bytes."""
    start = segment.append(Pieces([data]))
    return BulkRange(segment.store, segment.name, start, len(data), bulk_digest(data))


async def test_a_range_is_read(bus: Bus, tmp_path: Path, segment: Segment) -> None:
    written(segment, b"before")
    where = written(segment)
    await bus.bulk.stores.register(segment.store, StorePlace(str(tmp_path / segment.store)))
    assert await bus.bulk.read(where) == DATA
    assert await bus.bulk.read(where) == DATA


async def test_other_tasks_go_on_while_a_large_range_is_read(
    bus: Bus, tmp_path: Path, segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = written(segment)
    await bus.bulk.stores.register(segment.store, StorePlace(str(tmp_path / segment.store)))
    monkeypatch.setattr(reader, "_LARGE_BYTES", len(DATA))
    others = threading.Event()

    def held(*args: Any) -> bytes | None:
        assert others.wait(PATIENCE)
        return read_range(*args)

    monkeypatch.setattr(segments, "read_range", held)
    async with anyio.create_task_group() as group:

        async def read() -> None:
            assert await bus.bulk.read(where) == DATA

        group.start_soon(read)
        await anyio.lowlevel.checkpoint()
        others.set()


async def test_an_unknown_store_is_gone(bus: Bus, segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    where = written(segment)
    with pytest.raises(BulkMissing, match=f"bulk store {segment.store} is gone"):
        await bus.bulk.read(where)
    # It is asked for again after a while.
    monkeypatch.setattr(reader, "_AGE_S", 0.0)
    await bus.bulk.stores.register(segment.store, StorePlace(str(segment._folder.path)))
    await anyio.lowlevel.checkpoint()
    assert await bus.bulk.read(where) == DATA


async def test_what_differs_is_refused(bus: Bus, tmp_path: Path, segment: Segment) -> None:
    where = written(segment)
    await bus.bulk.stores.register(segment.store, StorePlace(str(tmp_path / segment.store)))
    with pytest.raises(BulkMissing, match="digest"):
        await bus.bulk.read(msgspec.structs.replace(where, digest=bytes(16)))
    with pytest.raises(BulkMissing, match="digest"):
        await bus.bulk.read(msgspec.structs.replace(where, nbytes=where.nbytes - 1))
    for wrong in ({"offset": 1}, {"nbytes": where.nbytes + 1}, {"segment": "0" * 16}, {"segment": "index"}):
        with pytest.raises(BulkMissing, match=r"no such bytes in .* on this host"):
            await bus.bulk.read(msgspec.structs.replace(where, **wrong))
    assert await bus.bulk.read(where) == DATA
