"""The files of a bulk store: what is appended can be read, within bounds, and outlives the engine that wrote it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tracewire_bus.bulk.segments import Limit, Segment, SegmentFolder, StoreFull, read_range
from tracewire_bus.wire.pieces import Pieces


@pytest.fixture
def limit() -> Limit:
    return Limit(1 << 30)


@pytest.fixture
def store(tmp_path: Path, limit: Limit) -> SegmentFolder:
    return SegmentFolder.create(tmp_path, "bus", limit)


def files(store: SegmentFolder) -> set[str]:
    """The segments on the disk."""
    return {path.name for path in store.path.iterdir()} - {"index", "lock", "bus"}


def test_ranges_are_read_as_they_were_appended(store: SegmentFolder, limit: Limit) -> None:
    segment = store.open("t")
    # More buffers than one system call takes.
    parts = [[bytes([number % 256]) * (number % 7 + 1) for number in range(count)] for count in (1, 3000, 10)]
    starts = [segment.append(Pieces(part)) for part in parts]
    for start, part in zip(starts, parts, strict=True):
        joined = b"".join(part)
        assert read_range(store.path, segment.name, start, len(joined)) == joined
    assert store.nbytes == limit.nbytes == segment.nbytes == sum(len(b"".join(part)) for part in parts)
    assert read_range(store.path, segment.name, 0, segment.nbytes + 1) is None
    assert read_range(store.path, segment.name, 1 << 62, 1 << 62) is None
    assert read_range(store.path, "0" * 16, 0, 1) is None
    assert read_range(store.path / "gone", segment.name, 0, 1) is None


@pytest.mark.parametrize("name", ["../bus", "bus", "index", "", "0" * 15, "/etc/passwd", "0" * 16 + "\n"])
def test_only_segments_are_read(store: SegmentFolder, name: str) -> None:
    assert read_range(store.path, name, 0, 1) is None


def test_a_store_is_bounded(tmp_path: Path) -> None:
    limit = Limit(100)
    one, other = (SegmentFolder.create(tmp_path, "bus", limit) for _ in range(2))
    first, second = one.open("a"), other.open("b")
    first.append(Pieces([bytes(60)]))
    with pytest.raises(StoreFull, match="60 bytes, of 100"):
        second.append(Pieces([bytes(41)]))
    assert second.append(Pieces([bytes(40)])) == 0
    one.forget("a")
    assert limit.nbytes == 40
    assert second.append(Pieces([bytes(60)])) == 40


def test_what_a_disk_refuses_leaves_the_segment_as_it_was(
    store: SegmentFolder, limit: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = store.open("t")
    segment.append(Pieces([b"before"]))
    with full_disk(monkeypatch), pytest.raises(OSError, match="No space left"):
        segment.append(Pieces([b"after", b"wards"]))
    assert (limit.nbytes, segment.nbytes, (store.path / segment.name).read_bytes()) == (6, 6, b"before")
    # Not even the part that was written could be taken back.
    with full_disk(monkeypatch, read_only=True), pytest.raises(OSError, match="No space left"):
        segment.append(Pieces([b"after", b"wards"]))
    assert segment.append(Pieces([b"again"])) == 6
    assert read_range(store.path, segment.name, 6, 5) == b"again"


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, read_only: bool = False) -> Iterator[None]:
    """Within this context, a disk takes two more bytes; with `read_only`, no file gets shorter either."""
    write, left = os.pwritev, [2]

    def written(file: int, buffers: list[bytes], offset: int) -> int:
        if not left:
            raise OSError(28, "No space left on device")
        return write(file, [buffers[0][: left.pop()]], offset)

    def refused(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", written)
        if read_only:
            patch.setattr(os, "ftruncate", refused)
        yield


def test_a_segment_that_a_disk_has_no_room_for_leaves_nothing(
    tmp_path: Path, store: SegmentFolder, limit: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = store.open("t")
    index, opened = (store.path / "index").read_bytes(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with full_disk(monkeypatch), pytest.raises(OSError, match="No space left"):
            store.open("u")
    assert files(store) == {first.name}
    assert len(os.listdir("/proc/self/fd")) == opened
    assert (store.path / "index").read_bytes() == index
    assert list(store.traces) == ["t"]
    second = store.open("u")
    left(store, first, second)
    (adopted,) = SegmentFolder.adopt(tmp_path, "bus", limit)
    assert adopted.traces == {"t": {first.name: 0}, "u": {second.name: 0}}


def test_a_file_that_cannot_be_removed_stays_its_trace_s(
    store: SegmentFolder, limit: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        store.open("t").append(Pieces([bytes(10)]))

    def refused(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        with pytest.raises(OSError, match="Read-only"):
            store.forget("t")
    assert (len(store.traces["t"]), limit.nbytes) == (2, 20)
    store.forget("t")
    assert (files(store), store.traces, limit.nbytes) == (set(), {}, 0)


def test_a_closed_segment_takes_no_more(store: SegmentFolder) -> None:
    segment = store.open("t")
    segment.close()
    segment.close()
    with pytest.raises(OSError, match="closed"):
        segment.append(Pieces([b"x"]))


def test_a_trace_s_segments_go_together(store: SegmentFolder, limit: Limit) -> None:
    first, again, other = (store.open(trace) for trace in ("t", "t", "u"))
    for segment in (first, again, other):
        segment.append(Pieces([bytes(10)]))
    first.close()
    store.forget("t")
    assert files(store) == {other.name}
    assert limit.nbytes == store.nbytes == 10
    store.forget("t")
    # A reader that has the file open is not disturbed, and one that comes later finds nothing.
    assert read_range(store.path, first.name, 0, 10) is None


def left(store: SegmentFolder, *segments: Segment) -> None:
    """Have a store's engine die: the kernel closes its files."""
    for segment in segments:
        segment.close()
    os.close(store._lock)


def test_the_store_of_a_dead_engine_is_taken_over(tmp_path: Path, store: SegmentFolder) -> None:
    trace = "päth/with\nlines"
    segment, removed = store.open(trace), store.open("gone")
    segment.append(Pieces([b"saved"]))
    store.forget("gone")
    limit = Limit(100)
    assert SegmentFolder.adopt(tmp_path, "bus", limit) == []
    left(store, segment, removed)
    with (store.path / "index").open("a") as index:
        index.write('["torn')
    (store.path / ("f" * 16)).write_bytes(b"of no trace")
    assert SegmentFolder.adopt(tmp_path, "another bus", limit) == []
    (adopted,) = SegmentFolder.adopt(tmp_path, "bus", limit)
    assert (adopted.store, adopted.traces, limit.nbytes) == (store.store, {trace: {segment.name: 5}}, 5)
    assert files(adopted) == {segment.name}
    assert SegmentFolder.adopt(tmp_path, "bus", limit) == []
    # What the dead engine had begun to write takes no line of its successor's with it.
    later = adopted.open("later")
    left(adopted, later)
    (adopted,) = SegmentFolder.adopt(tmp_path, "bus", limit := Limit(100))
    assert adopted.traces == {trace: {segment.name: 5}, "later": {later.name: 0}}
    adopted.forget(trace)
    assert (limit.nbytes, adopted.nbytes) == (0, 0)


def test_a_damaged_store_stops_nobody(tmp_path: Path, store: SegmentFolder) -> None:
    damaged = SegmentFolder.create(tmp_path, "bus", Limit(100))
    segments = [one.open("t") for one in (store, damaged)]
    (damaged.path / "index").unlink()
    left(store, segments[0])
    left(damaged, segments[1])
    opened, limit = len(os.listdir("/proc/self/fd")), Limit(100)
    (adopted,) = SegmentFolder.adopt(tmp_path, "bus", limit)
    assert (adopted.store, limit.nbytes) == (store.store, 0)
    assert len(os.listdir("/proc/self/fd")) == opened + 1


def test_a_store_that_a_disk_has_no_room_for_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", refused)
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left"):
        SegmentFolder.create(tmp_path, "bus", Limit(100))
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_full_disk_is_freed_of_what_the_archive_has(
    tmp_path: Path, store: SegmentFolder, limit: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = store.open("t")
    segment.append(Pieces([bytes(10)]))
    segment.close()
    note, notes = store._note, []

    def full_until_one_is_gone(*line: str) -> None:
        notes.append(line)
        if (store.path / segment.name).exists():
            raise OSError(28, "No space left on device")
        note(*line)

    monkeypatch.setattr(store, "_note", full_until_one_is_gone)
    assert store.kept("t") == [segment.name]
    store.shed("t", segment.name)
    assert (files(store), store.kept("t"), limit.nbytes, len(notes)) == (set(), [], 0, 2)
    left(store)
    (adopted,) = SegmentFolder.adopt(tmp_path, "bus", Limit(100))
    assert (adopted.archived, adopted.kept("t")) == ({segment.name}, [])


def test_a_store_is_removed_once_its_engine_and_its_private_redis_are_gone(tmp_path: Path, limit: Limit) -> None:
    socket, parent = tmp_path / "redis.sock", tmp_path / "stores"
    socket.touch()
    private = SegmentFolder.create(parent, "private", limit, socket)
    public = SegmentFolder.create(parent, "public", limit)
    segments = [store.open("t") for store in (private, public)]
    (parent / "other").mkdir()
    assert SegmentFolder.sweep(parent) == 0
    socket.unlink()
    # The engine lives.
    assert SegmentFolder.sweep(parent) == 0
    socket.touch()
    left(private, segments[0])
    left(public, segments[1])
    # The private Redis runs.
    assert SegmentFolder.sweep(parent) == 0
    socket.unlink()
    assert SegmentFolder.sweep(parent) == 1
    assert {path.name for path in parent.iterdir()} == {public.store, "other"}


def test_an_empty_store_is_removed(tmp_path: Path, store: SegmentFolder) -> None:
    store.open("t")
    store.forget("t")
    store.leave()
    assert list(tmp_path.iterdir()) == []


def test_a_store_with_segments_stays(tmp_path: Path, store: SegmentFolder) -> None:
    store.open("t").append(Pieces([b"x"]))
    store.leave()
    assert [path.name for path in tmp_path.iterdir()] == [store.store]


def test_what_is_no_store_is_left_alone(tmp_path: Path, limit: Limit) -> None:
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "0123456789abcdef").mkdir()
    (tmp_path / "fedcba9876543210").write_text("a file")
    assert SegmentFolder.adopt(tmp_path, "bus", limit) == []
    assert (tmp_path / "notes").read_text() == "mine"


def test_no_other_user_reads_a_store(store: SegmentFolder) -> None:
    segment = store.open("t")
    assert store.path.stat().st_mode & 0o777 == 0o700
    assert (store.path / segment.name).stat().st_mode & 0o777 == 0o600
