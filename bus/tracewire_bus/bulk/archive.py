"""Archives of bulk stores: engines move the segments of ended traces to a place that fsspec has a URL for.

An archive outlives the engine's host. A segment is the file or object `<store>/<segment>` below the archive's URL.
fsspec blocks, so everything here that names no thread is called in one.
"""

from __future__ import annotations

import importlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

__all__ = ["Archive", "ArchiveError", "ArchiveReader"]

#: A reader fetches at least this many bytes at once, since ranges of a segment are read one after the other.
_AHEAD: Final = 8 << 20
#: How many such pieces a reader keeps.
_PIECES: Final = 8


class ArchiveError(Exception):
    """The archive refuses, cannot be reached, or needs a package that is not installed."""


class Archive:
    """The archive at a URL, such as `s3://bucket/bulk`, or in a folder. fsspec finds the credentials.

    Every method may raise `ArchiveError`.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._opened: tuple[Any, str] | None = None
        self._lock = threading.Lock()

    def _do(self, what: Callable[[Any, str], Any], *names: str) -> Any:
        """Call `what` with fsspec's file system and the path of these names below the URL."""
        try:
            with self._lock:
                if self._opened is None:
                    self._opened = importlib.import_module("fsspec.core").url_to_fs(self.url)
            system, root = self._opened
            return what(system, "/".join((root.rstrip("/"), *names)))
        except FileNotFoundError:
            raise
        except ImportError as error:
            needs = 'pip install "tracewire[archive]"'
            raise ArchiveError(
                f"archive {self.url} needs a package that is not installed ({needs}): {error}"
            ) from error
        except Exception as error:  # each of fsspec's file systems raises errors of its own
            raise ArchiveError(f"archive {self.url}: {type(error).__name__}: {error}") from error

    def check(self) -> None:
        """Write and remove a file, to find out whether the archive takes any."""
        self._do(lambda system, path: system.makedirs(path, exist_ok=True))
        self._do(lambda system, path: system.pipe_file(path, b"check"), "check")
        self._do(lambda system, path: system.rm_file(path), "check")

    def put(self, store: str, segment: str, file: Path) -> None:
        """Copy the file of a segment there."""
        self._do(lambda system, path: system.makedirs(path, exist_ok=True), store)
        self._do(lambda system, path: system.put_file(str(file), path), store, segment)

    def read(self, store: str, segment: str, offset: int, nbytes: int) -> bytes | None:
        """At most `nbytes` bytes from `offset` on; `None` if there is no such segment."""
        end = offset + nbytes
        try:
            found: bytes = self._do(lambda system, path: system.cat_file(path, start=offset, end=end), store, segment)
        except FileNotFoundError:
            return None
        return found

    def remove(self, store: str, segment: str) -> None:
        """Remove a segment, if it is there."""
        with suppress(FileNotFoundError):
            self._do(lambda system, path: system.rm_file(path), store, segment)


class ArchiveReader:
    """Reads ranges of the segments of one archive, ahead."""

    def __init__(self, url: str) -> None:
        self._archive = Archive(url)
        self._pieces: OrderedDict[tuple[str, str], tuple[int, bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, store: str, segment: str, offset: int, nbytes: int) -> bytes | None:
        """Bytes of a segment; `None` if there is no such segment, or it ends before.

        Raises:
            ArchiveError: the archive cannot be read.
        """
        with self._lock:
            first, piece = self._pieces.get((store, segment), (0, b""))
        if not first <= offset <= offset + nbytes <= first + len(piece):
            found = self._archive.read(store, segment, offset, max(nbytes, _AHEAD))
            if found is None:
                return None
            first, piece = offset, found
            with self._lock:
                self._pieces[store, segment] = first, piece
                self._pieces.move_to_end((store, segment))
                while len(self._pieces) > _PIECES:
                    self._pieces.popitem(last=False)
        data = piece[offset - first : offset - first + nbytes]
        return data if len(data) == nbytes else None
