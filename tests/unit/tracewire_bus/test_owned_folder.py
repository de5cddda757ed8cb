"""A folder goes with its owner, or with the next start after the owner was killed; never while the owner lives."""

from __future__ import annotations

import os
import stat
import tempfile
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
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


def test_files_elsewhere_go_with_the_folder_of_a_killed_owner(tmp_path: Path) -> None:
    kept, gone, anew = (tmp_path / name for name in ("kept", "gone", "anew"))
    for file in (kept, gone, anew):
        file.touch()
    names = [str(file) for file in (gone, anew)]
    left = left_by_killed(f"{MAKES}\nfrom pathlib import Path\nfolder.take_along([Path(one) for one in {names!r}])")
    # Another file has the name meanwhile.
    (tmp_path / "another").touch()
    (tmp_path / "another").replace(anew)
    with OwnedFolder(PREFIX) as folder:
        assert not left.exists()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["anew", "kept"]
        folder.take_along([kept])
    # Its owner has ended well.
    assert kept.exists()


def test_shared_memory_that_a_process_maps_stays() -> None:
    memory = SharedMemory(create=True, size=64)
    file = Path("/dev/shm", memory.name)
    makes = f"{MAKES}\nfrom pathlib import Path\nfolder.take_along([Path({str(file)!r})])"
    try:
        left_by_killed(makes)
        with OwnedFolder(PREFIX):
            assert file.exists()
        memory.close()
        left_by_killed(makes)
        with OwnedFolder(PREFIX):
            assert not file.exists()
    finally:
        resource_tracker.unregister(f"/{memory.name}", "shared_memory")
        file.unlink(missing_ok=True)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[["x"]]', '[["x", "y", 0]]'])
def test_a_list_of_files_elsewhere_that_is_none_removes_nothing(text: str) -> None:
    left = left_by_killed(MAKES)
    (left / "elsewhere").write_text(text)
    with OwnedFolder(PREFIX):
        assert not left.exists()


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
