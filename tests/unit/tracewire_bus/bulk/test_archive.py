"""Archives: what is put there is read as it was, ahead, and errors name the archive."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tracewire_bus.bulk import archive as module
from tracewire_bus.bulk.archive import Archive, ArchiveError, ArchiveReader

STORE, SEGMENT = "0123456789abcdef", "fedcba9876543210"


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    """The bytes of a segment that was put into the archive `archive`."""
    data = os.urandom(1000)
    (tmp_path / "segment").write_bytes(data)
    Archive(f"file://{tmp_path}/archive").put(STORE, SEGMENT, tmp_path / "segment")
    return data


def test_ranges_are_read_as_they_were_put(tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AHEAD", 100)
    reader, fetched = ArchiveReader(str(tmp_path / "archive")), []
    read = reader._archive.read

    def counted(*where: Any) -> bytes | None:
        fetched.append(where[2:])
        return read(*where)

    monkeypatch.setattr(reader._archive, "read", counted)
    for offset, nbytes in ((0, 40), (40, 60), (100, 300), (390, 10), (0, 0), (960, 40)):
        assert reader.read(STORE, SEGMENT, offset, nbytes) == data[offset : offset + nbytes]
    assert fetched == [(0, 100), (100, 300), (0, 100), (960, 100)]
    assert reader.read(STORE, SEGMENT, 990, 11) is None
    assert reader.read(STORE, "0" * 16, 0, 1) is None


def test_a_reader_keeps_few_pieces(tmp_path: Path) -> None:
    (tmp_path / "segment").write_bytes(b"x" * 10)
    archive, reader = Archive(str(tmp_path / "archive")), ArchiveReader(str(tmp_path / "archive"))
    for number in range(30):
        archive.put(STORE, f"{number:016}", tmp_path / "segment")
        assert reader.read(STORE, f"{number:016}", 0, 10) == b"x" * 10
    assert len(reader._pieces) == module._PIECES


def test_what_is_removed_is_gone(tmp_path: Path, data: bytes) -> None:
    archive = Archive(str(tmp_path / "archive"))
    archive.remove(STORE, SEGMENT)
    archive.remove(STORE, SEGMENT)
    assert archive.read(STORE, SEGMENT, 0, 10) is None


@pytest.mark.parametrize("url", ["nowhere://bucket", "s3://bucket-that-is-not-there/x"])
def test_errors_name_the_archive(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An address at which nothing answers.
    for name, value in {"ENDPOINT_URL": "http://127.0.0.1:9", "ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "y"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(ArchiveError, match=f"archive {url}"):
        Archive(url).check()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(f"no {name}")

    monkeypatch.setattr(module.importlib, "import_module", absent)
    with pytest.raises(ArchiveError, match=r'pip install "tracewire\[archive\]"'):
        Archive("/anywhere").check()
