"""A folder goes with its owner, or with the next start after the owner was killed; never while the owner lives."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from tests.support.killed_owner import left_by_killed
from tracewire_bus.owned_folder import MAX_SOCKET_PATH, OwnedFolder

#: A kind of folder of these tests alone.
PREFIX = f"tracewire-owned-{os.getpid()}-"
MAKES = f"from tracewire_bus.owned_folder import OwnedFolder\nfolder = OwnedFolder({PREFIX!r}); path = folder.path"


def test_it_is_private_and_goes_with_its_files() -> None:
    with OwnedFolder(PREFIX) as folder:
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        (folder.path / "below").mkdir()
        (folder.path / "below" / "file").write_text("x")
    assert not folder.path.exists()
    folder.remove()


def test_the_next_owner_removes_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    left = left_by_killed(MAKES)
    (left / "socket").touch()
    (elsewhere := tmp_path / "kept").mkdir()
    (elsewhere / "lock").touch()
    link = Path(tempfile.gettempdir()) / f"{PREFIX}link"
    link.symlink_to(elsewhere)
    with OwnedFolder(f"{PREFIX}other-"):
        # Of another kind.
        assert left.exists()
    try:
        with OwnedFolder(PREFIX) as one, OwnedFolder(PREFIX) as two:
            assert not left.exists()
            assert one.path.exists()
            assert two.path.exists()
            assert (elsewhere / "lock").exists()
    finally:
        link.unlink()


def test_a_folder_whose_owner_has_not_locked_it_yet_stays() -> None:
    unlocked = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        (unlocked / "lock.new").touch()
        with OwnedFolder(PREFIX):
            assert unlocked.exists()
    finally:
        (unlocked / "lock.new").unlink()
        unlocked.rmdir()


def test_a_socket_finds_room_for_its_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with OwnedFolder(PREFIX) as without, OwnedFolder(PREFIX, longest=30) as within:
        assert without.path.parent == deep
        assert len(str(within.path / ("s" * 30))) < MAX_SOCKET_PATH
    with pytest.raises(
        OSError, match=r"^no folder tracewire-owned-.*: .*x must be writable and its path shorter than "
    ):
        OwnedFolder(PREFIX, longest=MAX_SOCKET_PATH)
