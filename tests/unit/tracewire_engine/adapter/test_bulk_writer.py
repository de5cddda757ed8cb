"""What traces save in volume lies beside Redis: every consumer has it, and nothing is lost when the store fails."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import fsspec
import pytest
from msgspec import Raw
from msgspec.msgpack import encode

import tracewire
from tests.support import ROOT
from tests.support.bulk_on_mount import in_bulk
from tests.support.harvests import s3_server
from tests.support.scripted_engine import ScriptedEngine, acts, expected, info, serving
from tests.support.stepping import PATIENCE, Gate
from tests.support.until import until
from tracewire import Client, Gap, Output, Result
from tracewire_bus.bulk import reader
from tracewire_bus.bulk.archive import Archive
from tracewire_bus.bulk.segments import SegmentFolder
from tracewire_bus.bus import FINAL_ID, Bus
from tracewire_bus.wire.bulk_ranges import BulkRange, bulk_digest, bulk_range
from tracewire_bus.wire.pieces import Pieces
from tracewire_engine.adapter import bulk_writer
from tracewire_engine.adapter.bulk_writer import BulkSettings, BulkWriter, TraceBulk, check_archive, check_folder

TOKENS = 40


@pytest.fixture
async def client(embedded: str, prefix: str) -> AsyncIterator[Client]:
    """A client on the session's Redis."""
    async with tracewire.connect(embedded, prefix=prefix) as client:
        yield client


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_writer, "LOOK_S", 0.05)


@pytest.fixture(params=["/dev/shm", ""], ids=["memory", "disk"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A folder in memory, or on a disk."""
    if not request.param:
        yield tmp_path / "bulk"
        return
    path = Path(request.param) / f"tracewire-test-{os.urandom(6).hex()}"
    yield path
    shutil.rmtree(path, ignore_errors=True)


def bulk(folder: Path, threshold: int = 1, most: int = 1 << 30, **options: Any) -> BulkSettings:
    """Settings that put nearly all saves beside Redis."""
    return BulkSettings(folder, threshold, most, **options)


def segments(folder: Path) -> set[Path]:
    """The segments of all stores in a folder."""
    return set(folder.glob("*/" + "[0-9a-f]" * 16))


def stores(folder: Path) -> list[Path]:
    """The stores in a folder."""
    return list(folder.iterdir())


@contextlib.asynccontextmanager
async def engine(bus: Bus, client: Client, settings: BulkSettings | None, **more: Any) -> AsyncIterator[Gate]:
    """A scripted engine with a bulk store, which steps when its gate is opened."""
    gate = Gate()
    async with serving(bus, ScriptedEngine(gate), info(), bulk=settings, **more):
        with anyio.fail_after(PATIENCE):
            await client.models.get("tiny", timeout=PATIENCE)
        yield gate


async def run(bus: Bus, client: Client, gate: Gate, trace: str = "t", prompt: str = "hello") -> Result:
    """Run a trace to its end, an output for each token."""
    async with client.trace("tiny", prompt, acts, max_tokens=TOKENS, trace_id=trace, detach=True) as running:
        for count in range(1, TOKENS + 1):
            gate.step()
            await until(lambda count=count: _reached(bus, trace, count))
        with anyio.fail_after(PATIENCE):
            return await running.result()


async def _reached(bus: Bus, trace: str, count: int) -> bool:
    """Whether a trace's stream has this many outputs."""
    tail = await bus.tail_id(trace)
    return tail == FINAL_ID or int(tail.partition("-")[2]) >= count


def whole(result: Any, prompt: str = "hello") -> None:
    """A result, or a state, has every token and every save."""
    ids, saved = expected(prompt, TOKENS)
    assert result.token_ids == ids
    assert [list(map(float, array)) for array in result.saves["acts"]] == saved


async def test_every_consumer_has_what_lies_beside_redis(client: Client, bus: Bus, folder: Path) -> None:
    async with engine(bus, client, bulk(folder)) as gate:
        whole(await run(bus, client, gate))
        moved, outputs = await in_bulk(bus, "t")
        assert moved == outputs > 0
        events = [event async for event in client.subscribe("t")]
        saved = [item for event in events if isinstance(event, Output) for item in event.delta.get("acts", [])]
        assert [list(map(float, item)) for item in saved] == expected("hello", TOKENS)[1]
        whole(await client.get_state("t"))
        # A reader of the text alone fetches nothing.
        shutil.rmtree(folder)
        texts = [event async for event in client.subscribe("t", names=()) if isinstance(event, Output)]
        assert [token for event in texts for token in event.token_ids] == expected("hello", TOKENS)[0]
        assert all(event.delta == {} for event in texts)


async def test_small_saves_go_to_redis(client: Client, bus: Bus, tmp_path: Path) -> None:
    async with engine(bus, client, bulk(tmp_path, threshold=1 << 20)) as gate:
        whole(await run(bus, client, gate))
        assert (await in_bulk(bus, "t"))[0] == 0
        assert len(stores(tmp_path)) == 1
        assert not segments(tmp_path)


async def test_streams_are_trimmed_as_ever(client: Client, bus: Bus, tmp_path: Path) -> None:
    async with engine(bus, client, bulk(tmp_path), retain_events=5) as gate:
        whole(await run(bus, client, gate))
        whole(await client.get_state("t"))
        late = [event async for event in client.subscribe("t")]
        assert isinstance(late[0], Gap)


# --- a store that fails ---------------------------------------------------------------------------------------------


async def test_a_full_store_costs_no_save(client: Client, bus: Bus, tmp_path: Path) -> None:
    async with engine(bus, client, bulk(tmp_path, most=300)) as gate:
        result = await run(bus, client, gate)
        whole(result)
        moved, outputs = await in_bulk(bus, "t")
        assert 0 < moved < outputs
        assert result.warnings == [
            f"the saves of {outputs - moved} outputs went to Redis: the engine's bulk store took no more"
        ]
        whole(await run(bus, client, gate, "u", "other"), "other")
        assert (await in_bulk(bus, "u"))[0] == 0


async def test_a_folder_that_goes_away_costs_no_save(
    client: Client, bus: Bus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "bulk"
    async with engine(bus, client, bulk(folder)) as gate:
        whole(await run(bus, client, gate))
        shutil.rmtree(folder)
        result = await run(bus, client, gate, "u", "other")
        whole(result, "other")
        assert len(result.warnings) == 1
        assert [record.message for record in caplog.records if "takes no more" in record.message] != []
        # What the store had is gone, and the first trace says so. Its text is on Redis.
        with pytest.raises(tracewire.ValueMissing, match=r"trace t cannot be loaded.*no such bytes.*--bulk-listen"):
            await client.get_state("t")
        events = [event async for event in client.subscribe("t") if isinstance(event, Output)]
        assert [token for event in events for token in event.token_ids] == expected("hello", TOKENS)[0]
        with pytest.raises(tracewire.ValueMissing, match=f"event {events[3].id} of trace t"):
            _ = events[3].delta


@pytest.mark.parametrize("how", ["full", "ro"])
async def test_a_file_system_that_takes_nothing_for_a_while(
    embedded: str, prefix: str, tmp_path: Path, how: str
) -> None:
    script = 'mount -t tmpfs -o size=64k tmpfs "$4" && exec "$1" -m tests.support.bulk_on_mount "$2" "$3" "$4" "$5"'
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh", sys.executable]
    done = await anyio.run_process([*command, embedded, prefix, str(tmp_path), how], cwd=ROOT, stderr=None)
    found = json.loads(done.stdout)
    assert found["whole"]
    assert found["warned"] == ["beside", "during"]
    assert {name for name, moved in found["moved"].items() if moved == 0} == {"beside", "during"}
    assert all(found["moved"][name] == found["outputs"][name] > 0 for name in ("before", "dropped", "after"))


async def test_a_segment_that_is_gone_is_its_trace_s_loss_alone(client: Client, bus: Bus, tmp_path: Path) -> None:
    async with (
        engine(bus, client, bulk(tmp_path)) as gate,
        client.trace("tiny", "hello", acts, max_tokens=TOKENS, trace_id="t", detach=True) as lost,
    ):
        await lost.accepted()
        await until(lambda: gate.step() or _reached(bus, "t", 1))
        (segment,) = segments(tmp_path)
        async with client.trace("tiny", "other", acts, max_tokens=TOKENS, trace_id="u", detach=True) as beside:
            await beside.accepted()
            await until(lambda: gate.step() or _reached(bus, "u", 1))
            assert await bus.tail_id("t") != FINAL_ID
            segment.unlink()
            gate.open()
            events = [event async for event in client.subscribe("t", names=()) if isinstance(event, Output)]
            with anyio.fail_after(PATIENCE):
                whole(await beside.result(), "other")
        tokens = [token for event in events for token in event.token_ids]
        assert tokens == expected("hello", TOKENS)[0]
        with pytest.raises(tracewire.ValueMissing, match=r"trace t cannot be loaded.*no such bytes"):
            await client.get_state("t")
        with pytest.raises(tracewire.ValueMissing, match="no such bytes"), anyio.fail_after(PATIENCE):
            await lost.result()
        whole(await run(bus, client, gate, "v", "later"), "later")


async def test_a_segment_cut_short_or_changed_is_seen(client: Client, bus: Bus, tmp_path: Path) -> None:
    async with engine(bus, client, bulk(tmp_path)) as gate:
        for trace, change in (("cut", lambda data: data[:-1]), ("changed", lambda data: data[:-1] + b"\xff")):
            before = segments(tmp_path)
            await run(bus, client, gate, trace)
            (segment,) = segments(tmp_path) - before
            segment.write_bytes(change(segment.read_bytes()))
            with pytest.raises(tracewire.ValueMissing, match=r"no such bytes|do not match the digest"):
                await client.get_state(trace)


async def test_a_store_that_redis_forgot_is_named_again(client: Client, bus: Bus, tmp_path: Path) -> None:
    async with engine(bus, client, bulk(tmp_path)) as gate:
        await run(bus, client, gate)
        (store,) = stores(tmp_path)
        await bus.command("DEL", bus.keys.bulk_store(store.name))

        async def known() -> bool:
            return await bus.bulk.stores.find(store.name) is not None

        await until(known)
        whole(await client.get_state("t"))


@pytest.mark.parametrize("path", ["/proc/bulk", "/dev/null/bulk"])
def test_a_folder_that_takes_no_store_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=f"--bulk: no bulk store can be made in {path}"):
        check_folder(Path(path))


def test_a_check_leaves_nothing(tmp_path: Path) -> None:
    check_folder(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


# --- how long it lies there -----------------------------------------------------------------------------------------


async def test_a_segment_goes_with_its_trace(client: Client, bus: Bus, tmp_path: Path) -> None:
    async with engine(bus, client, bulk(tmp_path)) as gate:
        for number in range(5):
            await run(bus, client, gate, f"t{number}")
        assert len(segments(tmp_path)) == 5
        for number in range(5):
            await bus.command("DEL", bus.keys.events(f"t{number}"), bus.keys.record(f"t{number}"))
        with anyio.move_on_after(20):
            await until(lambda: not segments(tmp_path))
        assert not segments(tmp_path)
    assert stores(tmp_path) == []


async def test_the_next_engine_takes_over_what_a_dead_one_had(client: Client, bus: Bus, tmp_path: Path) -> None:
    async with engine(bus, client, bulk(tmp_path)) as gate:
        await run(bus, client, gate)
    # It has left, and what it wrote is there.
    whole(await client.get_state("t"))
    (left,) = stores(tmp_path)
    async with engine(bus, client, bulk(tmp_path)) as gate:
        whole(await client.get_state("t"))
        whole(await run(bus, client, gate, "u", "other"), "other")
        await bus.command("DEL", bus.keys.events("t"), bus.keys.record("t"))

        async def gone() -> bool:
            return not left.exists()

        with anyio.fail_after(PATIENCE):
            await until(gone)
        assert await bus.bulk.stores.find(left.name) is None
        whole(await client.get_state("u"), "other")


async def test_engines_of_another_bus_leave_it_unless_that_is_gone_for_good(
    client: Client, bus: Bus, tmp_path: Path
) -> None:
    store = SegmentFolder.create(tmp_path, "another bus", bulk_writer.Limit(100))
    # A private Redis that is gone comes back to no engine.
    orphan = SegmentFolder.create(tmp_path, "private bus", bulk_writer.Limit(100), tmp_path / "gone.sock")
    for one in (store, orphan):
        one.open("t")
        os.close(one._lock)
    async with engine(bus, client, bulk(tmp_path)) as gate:
        await run(bus, client, gate)
        assert store.path.exists()
        assert not orphan.path.exists()


# --- the archive ----------------------------------------------------------------------------------------------------


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines move segments as soon as their traces have ended."""
    monkeypatch.setattr(bulk_writer, "ARCHIVE_S", 0.0)


def archived(folder: Path) -> set[Path]:
    """The segments in an archive."""
    return {path for path in folder.glob("*/*") if path.is_file()}


@pytest.mark.usefixtures("at_once")
async def test_segments_of_ended_traces_move_to_the_archive(
    client: Client, bus: Bus, folder: Path, tmp_path: Path
) -> None:
    archive = tmp_path / "archive"
    async with engine(bus, client, bulk(folder, archive=f"file://{archive}")) as gate:
        whole(await run(bus, client, gate))
        await until(lambda: archived(archive) and not segments(folder))
        whole(await client.get_state("t"))
        # What was moved takes no room in the store.
        (store,) = stores(folder)
        place = await bus.bulk.stores.find(store.name)
        assert place is not None
        assert place.archive == f"file://{archive}"
    # The engine and its host are gone: latecomers read all the same.
    shutil.rmtree(folder)
    whole(await client.get_state("t"))
    saved = [item async for event in client.subscribe("t") if isinstance(event, Output) for item in event.delta["acts"]]
    assert [list(map(float, item)) for item in saved] == expected("hello", TOKENS)[1]


@pytest.mark.usefixtures("at_once")
async def test_what_is_archived_goes_with_its_trace(client: Client, bus: Bus, tmp_path: Path) -> None:
    archive, folder = tmp_path / "archive", tmp_path / "bulk"
    settings = bulk(folder, archive=str(archive))
    async with engine(bus, client, settings) as gate:
        await run(bus, client, gate)
        await run(bus, client, gate, "u", "other")
        await until(lambda: len(archived(archive)) == 2 and not segments(folder))
        await bus.command("DEL", bus.keys.events("t"), bus.keys.record("t"))
        await until(lambda: len(archived(archive)) == 1)
    # The next engine knows what the one before has moved.
    async with engine(bus, client, settings):
        whole(await client.get_state("u"), "other")
        await bus.command("DEL", bus.keys.events("u"), bus.keys.record("u"))
        await until(lambda: not archived(archive))


@pytest.mark.usefixtures("at_once")
async def test_an_archive_that_refuses_loses_nothing(
    client: Client, bus: Bus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    archive, folder = tmp_path / "archive", tmp_path / "bulk"
    archive.write_text("a file, and no folder")
    async with engine(bus, client, bulk(folder, archive=str(archive))) as gate:
        whole(await run(bus, client, gate))
        await until(lambda: "stay in" in caplog.text)
        assert segments(folder)
        whole(await client.get_state("t"))
        archive.unlink()
        await until(lambda: archived(archive) and not segments(folder))
        whole(await client.get_state("t"))


def saved(text: bytes) -> list[Raw | Pieces]:
    """The deltas of an output of one step."""
    return [Raw(encode(text * 20))]


async def put(place: TraceBulk, text: bytes) -> BulkRange:
    """Put an output's saves there."""
    taken = await place.take(saved(text))
    assert taken is not None
    where = bulk_range(taken)
    assert where is not None
    return where


@pytest.mark.usefixtures("at_once")
async def test_segments_of_a_trace_that_runs_again_move_when_it_has_ended(bus: Bus, tmp_path: Path) -> None:
    """An engine has died, and the next one runs its trace."""
    archive, folder = tmp_path / "archive", tmp_path / "bulk"
    settings = bulk(folder, archive=str(archive))
    first, second = BulkWriter(bus, settings), BulkWriter(bus, settings)
    first.start()
    for trace in ("runs", "ended"):
        place = first.of_trace(trace)
        await put(place, b"first")
        place.close()
    first.close()
    second.start()
    place = second.of_trace("runs")
    ranges = [await put(place, b"again")]
    async with anyio.create_task_group() as group:
        group.start_soon(second._move_ended, second._archive)
        await until(lambda: archived(archive))
        # The other one's would have been moved before.
        assert len(archived(archive)) == 1
        ranges.append(await put(place, b"later"))
        for where in ranges:
            found = await second._read(where.store, where.segment, where.offset, where.nbytes)
            assert found is not None
            assert bulk_digest(found) == where.digest
        place.close()
        await until(lambda: len(archived(archive)) == 3 and not segments(folder))
        group.cancel_scope.cancel()
    # A trace that saves nothing is none that runs.
    second.of_trace("rejected")
    assert not second._running
    second.close()


@pytest.mark.usefixtures("at_once")
async def test_what_the_archive_has_is_not_sent_again(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, folder, puts = tmp_path / "archive", tmp_path / "bulk", []
    writer = BulkWriter(bus, bulk(folder, archive=str(archive)))
    writer.start()
    place = writer.of_trace("t")
    await put(place, b"saved")
    place.close()
    (store,) = writer._stores.values()
    keep, tries = Archive.put, []

    def counted(self: Archive, *of: Any) -> None:
        puts.append(of)
        keep(self, *of)

    def refused(*_: object) -> None:
        tries.append(1)
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Archive, "put", counted)
    async with anyio.create_task_group() as group:
        with monkeypatch.context() as patch:
            patch.setattr(store, "shed", refused)
            group.start_soon(writer._move_ended, writer._archive)
            await until(lambda: len(tries) >= 3)
        await until(lambda: not segments(folder))
        group.cancel_scope.cancel()
    assert len(puts) == len(archived(archive)) == 1
    # Redis has dropped the trace.
    assert await writer._remove("t")
    assert not archived(archive)
    writer.close()


@pytest.mark.usefixtures("at_once")
async def test_an_archive_that_refuses_the_credentials(
    client: Client, bus: Bus, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, folder = "s3://acts/bulk", tmp_path / "bulk"
    with s3_server() as (_, options):
        wrong = {**options, "secret": "wrong"}
        # As fsspec finds credentials in its configuration or the environment.
        monkeypatch.setitem(fsspec.config.conf, "s3", wrong)
        with pytest.raises(
            ValueError, match=f"--bulk-archive: no segments can be moved there: archive {url}: .*signature"
        ):
            await anyio.to_thread.run_sync(check_archive, url)
        async with engine(bus, client, bulk(folder, archive=url)) as gate:
            whole(await run(bus, client, gate))
            await until(lambda: "stay in" in caplog.text)
            assert "signature" in caplog.text
            assert segments(folder)
            whole(await client.get_state("t"))
        monkeypatch.setitem(fsspec.config.conf, "s3", options)
        async with engine(bus, client, bulk(folder, archive=url)) as gate:
            whole(await run(bus, client, gate, "u", "other"), "other")
            await until(lambda: not segments(folder))
        # A consumer with other credentials.
        monkeypatch.setitem(fsspec.config.conf, "s3", wrong)
        async with tracewire.connect(client.url, prefix=bus.keys.prefix) as other:
            with pytest.raises(tracewire.ValueMissing, match=f"archive {url}: .*signature"):
                await other.get_state("u")
            texts = [event async for event in other.subscribe("u", names=()) if isinstance(event, Output)]
            assert [token for event in texts for token in event.token_ids] == expected("other", TOKENS)[0]
        monkeypatch.setitem(fsspec.config.conf, "s3", options)
        for name, prompt in (("t", "hello"), ("u", "other")):
            async with tracewire.connect(client.url, prefix=bus.keys.prefix) as other:
                whole(await other.get_state(name), prompt)


@pytest.mark.usefixtures("at_once")
async def test_what_an_archive_lost_is_named(client: Client, bus: Bus, tmp_path: Path) -> None:
    archive, folder = tmp_path / "archive", tmp_path / "bulk"
    async with engine(bus, client, bulk(folder, archive=str(archive))) as gate:
        await run(bus, client, gate)
        await until(lambda: archived(archive) and not segments(folder))
        (segment,) = archived(archive)
        data = segment.read_bytes()
        for left in (data[:-1], data[:-1] + b"\xff", None):
            segment.unlink() if left is None else segment.write_bytes(left)
            async with tracewire.connect(client.url, prefix=bus.keys.prefix) as other:
                with pytest.raises(tracewire.ValueMissing, match=r"no such bytes|do not match the digest"):
                    await other.get_state("t")


def test_an_archive_that_takes_nothing_is_refused(tmp_path: Path) -> None:
    check_archive(str(tmp_path / "new"))
    (tmp_path / "file").touch()
    for url, why in ((str(tmp_path / "file"), "Error"), ("nowhere://x", "nowhere")):
        with pytest.raises(ValueError, match=f"--bulk-archive: no segments can be moved there: .*{why}"):
            check_archive(url)


# --- other hosts ----------------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have consumers see no folder of the engine's, as on another host."""
    monkeypatch.setattr(reader, "_read_here", lambda place, where: None)


@pytest.mark.usefixtures("elsewhere")
async def test_consumers_elsewhere_get_it_from_the_engine(client: Client, bus: Bus, folder: Path) -> None:
    async with engine(bus, client, bulk(folder, listen="127.0.0.1:0")) as gate:
        whole(await run(bus, client, gate))
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(_has_all, client)


async def _has_all(client: Client) -> None:
    whole(await client.get_state("t"))


@pytest.mark.usefixtures("elsewhere")
async def test_consumers_elsewhere_are_told_how_to_get_it(client: Client, bus: Bus, tmp_path: Path) -> None:
    async with engine(bus, client, bulk(tmp_path)) as gate:
        with pytest.raises(tracewire.ValueMissing, match="--bulk-listen"):
            await run(bus, client, gate)


@pytest.mark.usefixtures("elsewhere")
async def test_an_engine_that_serves_no_more_is_named(client: Client, bus: Bus, tmp_path: Path) -> None:
    async with engine(bus, client, bulk(tmp_path, listen="127.0.0.1:0")) as gate:
        await run(bus, client, gate)
    with pytest.raises(tracewire.ValueMissing, match=r"the engine at 127\.0\.0\.1:\d+.*has not sent them"):
        await client.get_state("t")
