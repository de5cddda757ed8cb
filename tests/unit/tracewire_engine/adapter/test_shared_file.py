"""A file that traces share: it is sent to remote workers once, whole, and removed there only if it was sent."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from tracewire_engine.adapter import shared_file
from tracewire_engine.adapter.shared_file import SharedFile, written_whole


class _Workers:
    """Remote workers that note what they are told. With `hangs`, they never answer a drop."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.told: list[tuple[str, str]] = []
        self._hangs = hangs

    async def carry(self, path: Path) -> None:
        self.told.append(("carry", path.name))

    async def drop(self, path: Path) -> None:
        self.told.append(("drop", path.name))
        if self._hangs:
            await anyio.sleep_forever()


async def test_a_file_is_sent_once_and_dropped(tmp_path: Path) -> None:
    workers = _Workers()
    file = SharedFile(tmp_path / "one", workers)
    file.path.write_bytes(b"x")
    assert not file.is_everywhere
    await file.carry()
    await file.carry()
    assert file.is_everywhere
    file.unlink()
    assert not file.path.exists()
    await file.drop()
    assert workers.told == [("carry", "one"), ("drop", "one")]


async def test_a_file_that_was_not_sent_is_not_dropped(tmp_path: Path) -> None:
    workers = _Workers()
    file = SharedFile(tmp_path / "one", workers)
    file.unlink()
    await file.drop()
    assert workers.told == []


async def test_without_remote_workers_a_file_is_everywhere(tmp_path: Path) -> None:
    file = SharedFile(tmp_path / "one", None)
    assert file.is_everywhere
    await file.carry()
    await file.drop()


async def test_workers_that_hang_hold_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_file, "DROP_S", 0.05)
    workers = _Workers(hangs=True)
    file = SharedFile(tmp_path / "one", workers)
    await file.carry()
    await file.drop()
    assert workers.told[-1] == ("drop", "one")


def test_a_file_is_there_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "one"
    with written_whole(path) as out:
        out.write(b"half ")
        out.flush()
        assert not path.exists()
        out.write(b"whole")
    assert path.read_bytes() == b"half whole"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "one"
    path.write_bytes(b"as it was")
    with pytest.raises(OSError, match="full"), written_whole(path) as out:
        out.write(b"half ")
        raise OSError("full")
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("one", b"as it was")]
