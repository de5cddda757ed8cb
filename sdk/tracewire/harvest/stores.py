"""The store of a harvest: a folder, or any URL of fsspec. Its calls block, so a harvest makes them in threads.

A file appears whole or not at all. On this machine's disks the store writes it under another name, flushes it and
renames it. Elsewhere it is one put.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tracewire.errors import StoreFull, StoreRefused, StoreUnavailable, TracewireError

from .libraries import library
from .pieces import Piece, raw

__all__ = ["TEMPORARY", "Store"]

#: The end of the name of an incomplete file.
TEMPORARY = ".tmp"
#: Stores that have no folders. Asking them for one would make a bucket where a URL has a wrong one.
_WITHOUT_FOLDERS = frozenset({"abfs", "az", "gcs", "gs", "oss", "r2", "s3", "s3a"})
#: The errors of file systems without links, such as some network file systems.
_WITHOUT_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


class Store:
    """The files below one URL. Their names are relative to it, with `/`.

    Raises:
        LibraryMissing: fsspec, or what it needs for this kind of URL, is not installed.
        ValueError: fsspec knows no such kind of URL.
        StoreRefused: the store refuses the credentials.
        StoreUnavailable: the store does not answer.
    """

    def __init__(self, to: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> None:
        fsspec = library("fsspec")
        self.url = os.fspath(to)
        try:
            self._files, root = fsspec.core.url_to_fs(self.url, **dict(options or {}))
        except (ImportError, ValueError) as error:
            raise ValueError(f"to: {error}") from error
        except Exception as error:
            raise _store_error(self.url, "", error) from error
        self._root: str = root.rstrip("/")
        protocols = self._files.protocol
        kinds = {protocols} if isinstance(protocols, str) else set(protocols)
        self._local = bool(kinds & {"file", "local"})
        self._has_folders = not kinds & _WITHOUT_FOLDERS

    def path(self, name: str) -> str:
        """A file's path in fsspec's file system: the harvest's folder, then the name."""
        return f"{self._root}/{name}"

    def put(self, name: str, *pieces: Piece) -> None:
        """Write a file of these pieces. It replaces a file of the same name."""
        with self._errors(name):
            if self._local:
                self._put_locally(name, *pieces, replace=True)
            else:
                self._put_remotely(name, b"".join(map(raw, pieces)), mode="overwrite")

    def create(self, name: str, data: bytes) -> None:
        """Write a file, if the store has none of this name.

        A remote store may not be able to refuse a file while it writes. So the call asks it beforehand, and two callers
        at the same moment can both succeed there.

        Raises:
            FileExistsError: the store has a file of this name.
        """
        with self._errors(name, FileExistsError):
            if self._local:
                self._put_locally(name, data, replace=False)
                return
            if self._files.exists(self.path(name)):
                raise FileExistsError(name)
            self._put_remotely(name, data, mode="create")

    def read(self, name: str) -> bytes:
        """A file's bytes.

        Raises:
            FileNotFoundError: there is no such file.
        """
        with self._errors(name, FileNotFoundError):
            data: bytes = self._files.cat_file(self.path(name))
            return data

    def sizes(self, folder: str) -> dict[str, int]:
        """The files below a folder with their sizes in bytes, by their names; none where there is no such folder."""
        with self._errors(folder):
            self._files.invalidate_cache()
            try:
                found = self._files.find(self.path(folder), detail=True)
            except FileNotFoundError:
                return {}
            start = self.path("")
            return {path[path.index(start) + len(start) :]: int(one["size"]) for path, one in found.items()}

    def remove(self, name: str) -> None:
        """Remove a file, if it is there and the store allows it."""
        with suppress(Exception):
            self._files.rm_file(self.path(name))

    @contextmanager
    def _errors(self, name: str, *passed: type[Exception]) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if isinstance(error, (TracewireError, *passed)):
                raise
            raise _store_error(self.url, name, error) from error

    def _put_remotely(self, name: str, data: bytes, mode: str) -> None:
        path = self.path(name)
        try:
            self._pipe(path, data, mode)
        except FileNotFoundError:
            if not self._has_folders:
                raise
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._pipe(path, data, mode)

    def _pipe(self, path: str, data: bytes, mode: str) -> None:
        try:
            self._files.pipe_file(path, data, mode=mode)
        except (TypeError, NotImplementedError):
            # This kind of store has no modes.
            self._files.pipe_file(path, data)

    def _put_locally(self, name: str, *pieces: Piece, replace: bool) -> None:
        target = Path(self.path(name))
        # The first file makes the folder. If the folder is gone later, it is not made again, since its files are gone,
        # too.
        target.parent.mkdir(parents="/" not in name, exist_ok=True)
        written = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}{TEMPORARY}")
        try:
            with written.open("xb") as file:
                file.writelines(map(raw, pieces))
                file.flush()
                os.fsync(file.fileno())
            if replace:
                written.replace(target)
            else:
                _link(written, target)
        finally:
            written.unlink(missing_ok=True)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _link(written: Path, target: Path) -> None:
    """Give a file its name, if that is free. A link is refused where the name is taken, and a rename is not."""
    try:
        os.link(written, target)
    except OSError as error:
        if error.errno not in _WITHOUT_LINKS:
            raise
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        written.replace(target)


def _store_error(url: str, name: str, error: Exception) -> TracewireError:
    """The SDK's error for an error of the store."""
    number = getattr(error, "errno", None)
    reason = f"{type(error).__name__}: {error}"
    if number in _FULL:
        return StoreFull(url, name, reason)
    # botocore has errors of its own where there are no credentials at all.
    if isinstance(error, PermissionError) or number in _REFUSED or "Credentials" in type(error).__name__:
        return StoreRefused(url, name, reason)
    return StoreUnavailable(url, name, reason)
