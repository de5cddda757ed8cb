"""A private temporary folder that does not outlive its owner for long.

The process that made the folder removes it. If that process is killed, the next process that makes a folder with the
same prefix removes it. The owner holds a lock, which the kernel releases when the process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from .mapped_files import mapped_files

__all__ = ["MAX_SOCKET_PATH", "OwnedFolder"]

#: The longest path of a unix socket, in bytes; the kernel's limit is 107.
MAX_SOCKET_PATH: Final = 100

#: The file with the names, devices and inodes of files elsewhere.
_ELSEWHERE: Final = "elsewhere"


class OwnedFolder:
    """A folder that only this user can enter: `with OwnedFolder("tracewire-link-") as folder: folder.path`.

    Making one removes the folders with the same prefix whose owners were killed.

    Args:
        prefix: of the folder's name. A prefix of another kind of folder must not begin with it.
        longest: the longest name of a unix socket in the folder, in characters; 0 if there is none. The folder is made
            where the paths of such sockets are not too long.

    Raises:
        OSError: no folder can be made.
    """

    def __init__(self, prefix: str, longest: int = 0) -> None:
        _remove_leftovers(prefix)
        self.path = _private_folder(prefix, longest)
        # Locked before the file gets its name: an unlocked `lock` means that the owner is dead.
        self._lock: int | None = os.open(self.path / "lock.new", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(self.path / "lock.new", self.path / "lock")

    def take_along(self, files: Iterable[Path]) -> None:
        """Have files elsewhere removed with the folder if its owner is killed, and not if the owner ends well."""
        known = []
        for file in files:
            # It may be gone already.
            with contextlib.suppress(FileNotFoundError):
                status = file.lstat()
                known.append((str(file), status.st_dev, status.st_ino))
        (self.path / f"{_ELSEWHERE}.new").write_text(json.dumps(known))
        os.rename(self.path / f"{_ELSEWHERE}.new", self.path / _ELSEWHERE)

    def remove(self) -> None:
        """Remove the folder with its files. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _parents() -> list[str]:
    """Where folders are made: the first of these that fits."""
    return list(dict.fromkeys((tempfile.gettempdir(), "/tmp")))  # noqa: S108  # nosec B108


def _private_folder(prefix: str, longest: int) -> Path:
    room = MAX_SOCKET_PATH - len(os.fsencode(f"/{prefix}12345678/")) - longest
    for parent in _parents():
        if not longest or len(os.fsencode(parent)) < room:
            with contextlib.suppress(OSError):
                # `mkdtemp` creates the folder with mode 0700.
                return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    shorter = f" and its path shorter than {room} bytes" if longest else ""
    raise OSError(f"no folder {prefix}*: {tempfile.gettempdir()} must be writable{shorter}")


def _remove_leftovers(prefix: str) -> None:
    """Remove the folders whose owners were killed."""
    for parent in _parents():
        for path in Path(parent).glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                if path.is_symlink() or path.stat().st_uid != os.getuid():
                    continue
                lock = os.open(path / "lock", os.O_RDWR | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove_elsewhere(path / _ELSEWHERE)
                    shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(lock)


def _remove_elsewhere(known: Path) -> None:
    """Remove the files that a folder whose owner was killed took along.

    A file that has the name of one anew stays, and so does shared memory that a process still maps.
    """
    try:
        files = [(str(name), int(device), int(inode)) for name, device, inode in json.loads(known.read_text())]
    except (OSError, ValueError, TypeError):
        return
    used = mapped_files() if files else set()
    for name, device, inode in files:
        with contextlib.suppress(OSError):
            status = os.lstat(name)
            same = (status.st_dev, status.st_ino, status.st_uid) == (device, inode, os.getuid())
            if same and stat.S_ISREG(status.st_mode) and (device, inode) not in used:
                os.unlink(name)
