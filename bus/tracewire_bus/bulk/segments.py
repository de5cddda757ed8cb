"""Segments: the files of a bulk store. An attempt of a trace appends to one, and consumers read ranges of it.

A store is a folder with the segments of one engine, in memory (`/dev/shm`) or on a disk. The folder's `index` maps
each segment to its trace, and says which segments have moved to the archive. The engine that owns a store holds a lock
on the folder. When an engine has died, the next engine that uses the same parent folder and the same bus takes its
stores over. A private Redis never comes back under the same URL. So the next engine removes the stores of its engines
once it is gone.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from tracewire_bus.wire.pieces import Pieces

__all__ = ["Segment", "SegmentFolder", "StoreFull", "read_range"]

logger = logging.getLogger("tracewire")

_NAME = re.compile("[0-9a-f]{16}")
#: How many buffers one system call takes (`IOV_MAX` of Linux).
_BUFFERS: Final = 1024
_INDEX, _LOCK, _BUS, _SOCKET = "index", "lock", "bus", "socket"


class StoreFull(OSError):
    """The store is full."""


class Segment:
    """A file that one attempt of one trace appends to."""

    def __init__(self, folder: SegmentFolder, name: str, trace: str) -> None:
        self._folder = folder
        self.name = name
        self.trace = trace
        self.nbytes = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file: int | None = os.open(folder.path / name, flags, 0o600)

    @property
    def store(self) -> str:
        """The id of the segment's store."""
        return self._folder.store

    def append(self, data: Pieces) -> int:
        """Append bytes. Returns the offset at which they begin.

        Raises:
            StoreFull: the store holds as many bytes as it may.
            OSError: the file system takes no more. The segment is as it was before.
        """
        if self._file is None:
            raise OSError(f"segment {self.name} is closed")
        self._folder.reserve(len(data))
        start = self.nbytes
        try:
            _write_all(self._file, data.buffers, start)
        except BaseException:
            self._folder.reserve(-len(data))
            # The next bytes are written at the same offset in any case.
            with suppress(OSError):
                os.ftruncate(self._file, start)
            raise
        self.nbytes += len(data)
        self._folder.grew(self)
        return start

    def close(self) -> None:
        """Append no more. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def _write_all(file: int, buffers: Sequence[bytes | memoryview], offset: int) -> None:
    left = list(buffers)
    while left:
        written = os.pwritev(file, left[:_BUFFERS], offset)
        offset += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = memoryview(left[0])[written:]


class SegmentFolder:
    """The store of one engine, as the engine that owns it sees it: `path` is its folder, `store` its id.

    Attributes:
        nbytes: the size of all its segments.
        traces: the names of the segments of each trace, and their sizes in the folder.
        archived: the names of the segments that are in the archive.
    """

    def __init__(self, path: Path, lock: int, limit: Limit) -> None:
        self.path = path
        self.store = path.name
        self.nbytes = 0
        self.traces: dict[str, dict[str, int]] = {}
        self.archived: set[str] = set()
        #: Those of them of which the index says so, and those whose files are gone.
        self._noted: set[str] = set()
        self._shed: set[str] = set()
        self._lock = lock
        self._limit = limit

    @classmethod
    def create(cls, parent: Path, bus: str, limit: Limit, socket: Path | None = None) -> Self:
        """A new store in `parent`. `bus` says which bus the engine is on: see `adopt`.

        `socket` is the socket of a private Redis. `sweep` removes the store once it is gone.

        Raises:
            OSError: no folder or no file can be made there.
        """
        path = parent / secrets.token_hex(8)
        path.mkdir(mode=0o700, parents=True)
        lock: int | None = None
        try:
            lock = _locked(path)
            assert lock is not None
            (path / _INDEX).touch()
            if socket is not None:
                (path / _SOCKET).write_bytes(os.fsencode(socket))
            (path / _BUS).write_text(bus)
        except BaseException:
            # Nobody would take it over or remove it.
            shutil.rmtree(path, ignore_errors=True)
            if lock is not None:
                os.close(lock)
            raise
        return cls(path, lock, limit)

    @classmethod
    def adopt(cls, parent: Path, bus: str, limit: Limit) -> list[Self]:
        """The stores in `parent` of engines of the same bus that have died. The caller owns them from then on."""
        found = []
        for path in sorted(parent.iterdir()):
            try:
                if not _NAME.fullmatch(path.name) or (path / _BUS).read_text() != bus:
                    continue
                lock = _locked(path)
                if lock is not None:
                    found.append(cls._adopted(path, lock, limit))
            except (OSError, UnicodeDecodeError) as error:
                logger.debug("%s is no store that this engine can take over: %s", path, error)
        return found

    @classmethod
    def _adopted(cls, path: Path, lock: int, limit: Limit) -> Self:
        store = cls(path, lock, limit)
        try:
            store._read_index()
        except BaseException:
            store._grow(-store.nbytes)
            os.close(lock)
            raise
        return store

    @classmethod
    def sweep(cls, parent: Path) -> int:
        """Remove the stores in `parent` whose engine and whose private Redis are gone. Returns how many there were."""
        removed = 0
        for path in sorted(parent.iterdir()):
            try:
                if not _NAME.fullmatch(path.name) or Path(os.fsdecode((path / _SOCKET).read_bytes())).exists():
                    continue
                lock = _locked(path)
            except OSError as error:
                logger.debug("%s is no store of a private Redis: %s", path, error)
                continue
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)
                removed += 1
        return removed

    def _read_index(self) -> None:
        index = (self.path / _INDEX).read_bytes()
        if not index.endswith(b"\n"):
            # Part of a line, which would take the next one with it: its engine has died meanwhile.
            index = index[: index.rfind(b"\n") + 1]
            os.truncate(self.path / _INDEX, len(index))
        for line in index.splitlines():
            try:
                name, trace, *archived = json.loads(line)
                if archived:
                    for names in (self.archived, self._noted, self._shed):
                        names.add(name)
                    self._grow(-self.traces.setdefault(trace, {}).get(name, 0))
                    self.traces[trace][name] = 0
                    continue
                size = (self.path / name).stat().st_size
            except (ValueError, OSError):
                # A segment that was removed.
                continue
            self.traces.setdefault(trace, {})[name] = size
            self._grow(size)
        known = {name for segments in self.traces.values() for name in segments}
        for path in self.path.iterdir():
            if _NAME.fullmatch(path.name) and path.name not in known:
                path.unlink(missing_ok=True)

    def open(self, trace: str) -> Segment:
        """A new segment for an attempt of a trace.

        Raises:
            OSError: no file can be made.
        """
        segment = Segment(self, secrets.token_hex(8), trace)
        try:
            self._note(segment.name, trace)
        except BaseException:
            segment.close()
            with suppress(OSError):
                (self.path / segment.name).unlink()
            raise
        self.traces.setdefault(trace, {})[segment.name] = 0
        return segment

    def _note(self, *line: str) -> None:
        """Append a line to the index.

        Raises:
            OSError: the index cannot be written. It is as it was before.
        """
        file = os.open(self.path / _INDEX, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            end = os.lseek(file, 0, os.SEEK_END)
            try:
                _write_all(file, [json.dumps(line).encode() + b"\n"], end)
            except BaseException:
                # Part of a line would take the next one with it.
                with suppress(OSError):
                    os.ftruncate(file, end)
                raise
        finally:
            os.close(file)

    def kept(self, trace: str) -> list[str]:
        """A trace's segments that were not `shed`."""
        return [name for name in self.traces.get(trace, ()) if name not in self._noted or name not in self._shed]

    def shed(self, trace: str, segment: str) -> None:
        """Remove a segment's file, because the archive has it, and note that in the index.

        Raises:
            OSError: the file cannot be removed, or the index not written. A later call does what is left.
        """
        try:
            self._note_archived(trace, segment)
        except OSError:
            # A full file system may have room for the note once the file is gone.
            self._unlink(trace, segment)
            self._note_archived(trace, segment)
        self._unlink(trace, segment)

    def _note_archived(self, trace: str, segment: str) -> None:
        if segment not in self._noted:
            self._note(segment, trace, "archived")
            self._noted.add(segment)

    def _unlink(self, trace: str, segment: str) -> None:
        (self.path / segment).unlink(missing_ok=True)
        self._shed.add(segment)
        size, self.traces[trace][segment] = self.traces[trace][segment], 0
        self._grow(-size)

    def grew(self, segment: Segment) -> None:
        """Note the size of a segment."""
        if segment.name in self.traces.get(segment.trace, ()):
            self.traces[segment.trace][segment.name] = segment.nbytes

    def forget(self, trace: str) -> None:
        """Remove a trace's segments from the folder.

        Raises:
            OSError: a file cannot be removed. It still belongs to the trace.
        """
        left = self.traces.get(trace, {})
        for name, size in list(left.items()):
            (self.path / name).unlink(missing_ok=True)
            for names in (self.archived, self._noted, self._shed):
                names.discard(name)
            del left[name]
            self._grow(-size)
        self.traces.pop(trace, None)

    def reserve(self, nbytes: int) -> None:
        """Count bytes that are to be written.

        Raises:
            StoreFull: the store would hold more than it may.
        """
        if nbytes > self._limit.left:
            raise StoreFull(f"the bulk stores of this engine hold {self._limit.nbytes} bytes, of {self._limit.most}")
        self._grow(nbytes)

    def _grow(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._limit.nbytes += nbytes

    def leave(self) -> None:
        """Give the store up: the next engine may take it over. An empty one is removed."""
        if not self.traces:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


class Limit:
    """How many bytes all stores of an engine may hold together."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.nbytes = 0

    @property
    def left(self) -> int:
        """How many more bytes fit."""
        return self.most - self.nbytes


def _locked(path: Path) -> int | None:
    """A file that holds the lock on a store; `None` if another process holds the lock."""
    file = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    except BaseException:
        os.close(file)
        raise
    return file


def read_range(path: str | Path, segment: str, offset: int, nbytes: int) -> bytes | None:
    """Bytes of a segment in the store at `path`; `None` if there is no such segment, or it ends before.

    Raises:
        OSError: the file cannot be read.
    """
    if not _NAME.fullmatch(segment):
        return None
    try:
        file = os.open(os.path.join(path, segment), os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        if os.fstat(file).st_size < offset + nbytes:
            # Not allocated before that is known: the range comes from the wire.
            return None
        data = os.pread(file, nbytes, offset)
        while len(data) < nbytes:
            more = os.pread(file, nbytes - len(data), offset + len(data))
            if not more:
                return None
            data += more
        return data
    finally:
        os.close(file)
