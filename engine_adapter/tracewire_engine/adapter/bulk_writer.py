"""Bulk stores, on the engine's side: large saves of outputs go to files, and events refer to them.

An output whose saves take more than `bulk_threshold` bytes goes to Redis without them. The engine appends them to a
segment of its bulk store (`tracewire_bus/bulk/segments.py`), and the event has a reference in their place. If the store
is full, outputs go to Redis whole, as without a store.

The engine keeps a segment as long as Redis has its trace. The engine looks for traces that Redis has dropped, takes the
stores of dead engines over, and serves all its stores to consumers on other hosts. With an archive, it moves the
segments of ended traces there.
"""

from __future__ import annotations

import errno
import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Final

import anyio
import msgspec
from anyio.abc import SocketStream, TaskGroup

from tracewire_bus.bulk.archive import Archive, ArchiveError
from tracewire_bus.bulk.remote import serve_bulk
from tracewire_bus.bulk.segments import Limit, Segment, SegmentFolder, read_range
from tracewire_bus.bulk.stores import StorePlace
from tracewire_bus.bus import Bus, BusError, BusUnavailable
from tracewire_bus.transport.backoff import Backoff
from tracewire_bus.transport.embedded import private_socket
from tracewire_bus.transport.urls import redacted
from tracewire_bus.wire.bulk_ranges import BulkRange, bulk_digest, encode_bulk_range
from tracewire_bus.wire.codec import encode_deltas, encoded_size
from tracewire_bus.wire.pieces import Pieces

__all__ = ["BulkSettings", "BulkWriter", "TraceBulk", "check_archive", "check_folder"]

logger = logging.getLogger("tracewire")

#: How often the engine looks for traces that Redis has dropped, in seconds, and at how many traces.
LOOK_S = 5.0
_LOOK_TRACES: Final = 500
#: How long a segment stays in the folder once its trace has ended, in seconds: most consumers are about to read it.
ARCHIVE_S = 10.0
#: How many consumers on other hosts the engine serves at once.
_CONSUMERS: Final = 256
#: The file systems that keep files in memory: writing there waits for no disk.
_IN_MEMORY: Final = frozenset(("tmpfs", "ramfs"))


class BulkSettings(msgspec.Struct, frozen=True):
    """Where the engine keeps bulk.

    Attributes:
        folder: the folder in which the engine makes its store. Engines may share it.
        threshold: outputs whose saves take more bytes than this go there.
        most: how many bytes the engine's stores may hold.
        listen: `host:port` at which the engine serves consumers on other hosts, a port of 0 for any; empty for none.
        advertise: the `host` under which those consumers find this one; empty for that of `listen`.
        archive: the URL to which the engine moves the segments of ended traces; empty for none.
    """

    folder: Path
    threshold: int
    most: int
    listen: str = ""
    advertise: str = ""
    archive: str = ""


class TraceBulk:
    """The segment of one attempt of one trace, made when it is first needed.

    Attributes:
        everything: whether all saves go there, whatever their size.
        refused: how many outputs went to Redis whole because the store did not take their saves.
    """

    def __init__(self, writer: BulkWriter, trace: str) -> None:
        self._writer = writer
        self._trace = trace
        self._segment: Segment | None = None
        self._lock = anyio.Lock(fast_acquire=True)
        self.everything = False
        self.refused = 0

    async def take(self, steps: Sequence[msgspec.Raw | Pieces]) -> msgspec.Raw | None:
        """Move the deltas of an output to the store. Returns the encoded reference to them.

        Returns `None` for deltas that are better sent to Redis: few, or more than the store takes.
        """
        size = encoded_size(steps)
        # Each step takes a byte at least.
        if size <= (len(steps) if self.everything else max(self._writer.threshold, len(steps))):
            return None
        data = encode_deltas(steps)
        try:
            async with self._lock:
                segment = self._segment = self._segment or self._writer.open(self._trace)
                start = await self._writer.append(segment, data)
        except OSError as error:
            self.refused += 1
            self._writer.report(error)
            return None
        return encode_bulk_range(BulkRange(segment.store, segment.name, start, len(data), bulk_digest(data)))

    def has_room(self, nbytes: int) -> bool:
        """Whether the store has room for this many bytes at present."""
        return self._writer.left >= nbytes

    def close(self) -> None:
        """Take no more: the attempt has ended."""
        if self._segment is not None:
            self._segment.close()
        self._writer.ended(self._trace)


class BulkWriter:
    """The bulk stores of one engine: its own, and those that it took over."""

    def __init__(self, bus: Bus, settings: BulkSettings) -> None:
        self._bus = bus
        self._settings = settings
        self.threshold = settings.threshold
        self._limit = Limit(settings.most)
        self._stores: dict[str, SegmentFolder] = {}
        self._own: SegmentFolder | None = None
        self._in_memory = False
        self._place = ("", "")
        self._archive = Archive(settings.archive) if settings.archive else None
        #: The traces with segments that have ended, each with when it ended here; 0 in an engine that died.
        self._ended: dict[str, float] = {}
        self._running: set[str] = set()
        self._failing = False
        self._refusals = Backoff()
        self._removals = Backoff()

    def start(self) -> None:
        """Make the engine's store, and take over those of dead engines.

        Raises:
            OSError: the folder takes no store.
        """
        folder, bus = self._settings.folder, _bus_id(self._bus)
        self._own = SegmentFolder.create(folder, bus, self._limit, private_socket(self._bus.url))
        if removed := SegmentFolder.sweep(folder):
            logger.info("removed %d bulk stores of engines whose private Redis is gone", removed)
        self._in_memory = _file_system(folder) in _IN_MEMORY
        for store in (self._own, *SegmentFolder.adopt(folder, bus, self._limit)):
            self._stores[store.store] = store
            self._ended |= dict.fromkeys(store.traces, 0.0)
        if len(self._stores) > 1:
            logger.info("took over %d bulk stores of engines that have died", len(self._stores) - 1)

    @property
    def left(self) -> int:
        """How many more bytes the stores may hold."""
        return self._limit.left

    def of_trace(self, trace: str) -> TraceBulk:
        """The place for the large saves of one attempt of a trace. The caller closes it."""
        return TraceBulk(self, trace)

    def open(self, trace: str) -> Segment:
        """A new segment of a trace, which stays until `ended` is called.

        Raises:
            OSError: no file can be made.
        """
        if self._own is None:
            raise OSError(errno.ENOENT, "the bulk store is not open")
        segment = self._own.open(trace)
        # The end of an earlier attempt is none of this one.
        self._ended.pop(trace, None)
        self._running.add(trace)
        return segment

    async def append(self, segment: Segment, data: Pieces) -> int:
        """Append bytes to a segment. Returns the offset at which they begin.

        Raises:
            OSError: the store takes no more.
        """
        if self._in_memory:
            start = segment.append(data)
        else:
            start = await anyio.to_thread.run_sync(segment.append, data)
        if self._failing:
            self._failing = False
            logger.warning("the bulk store in %s takes saves again", self._settings.folder)
        return start

    def report(self, error: OSError) -> None:
        """Log that the store took no more, once until it does again."""
        if not self._failing:
            self._failing = True
            logger.warning(
                "the bulk store in %s takes no more, and saves go to Redis: %s", self._settings.folder, error
            )

    def ended(self, trace: str) -> None:
        """Note that an attempt has ended: its segment goes once Redis drops the trace."""
        self._running.discard(trace)
        if any(trace in store.traces for store in self._stores.values()):
            self._ended[trace] = time.monotonic()

    # --- serving, and removing ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve consumers, and remove what Redis has dropped. Never ends by itself."""
        async with anyio.create_task_group() as group:
            if self._archive is not None:
                group.start_soon(self._move_ended, self._archive)
            backoff, refusals = Backoff(), Backoff()
            while True:
                try:
                    if self._settings.listen and not self._place[0]:
                        await self._listen(group)
                except OSError as error:
                    where = self._settings.listen
                    logger.log(backoff.level, "consumers on other hosts cannot be served at %s: %s", where, error)
                    backoff.next()
                try:
                    await self._register()
                    await self._remove_dropped()
                except BusUnavailable as error:
                    logger.debug("the bulk stores wait for Redis: %s", error)
                except BusError as error:
                    logger.log(refusals.level, "consumers do not find the bulk stores: %s", error)
                    refusals.next()
                await anyio.sleep(LOOK_S)

    async def _register(self) -> None:
        address, token = self._place
        for name, store in self._stores.items():
            await self._bus.bulk.stores.register(
                name, StorePlace(str(store.path), address, token, self._settings.archive)
            )

    async def _remove_dropped(self) -> None:
        looked = list(islice(self._ended, _LOOK_TRACES))
        there = await self._bus.records.existing(looked)
        for trace in looked:
            ended = self._ended.pop(trace, 0.0)
            if trace in there or (trace not in self._running and not await self._remove(trace)):
                # To the end of the line.
                self._ended[trace] = ended
        for name, store in list(self._stores.items()):
            if store is not self._own and not store.traces:
                await self._bus.bulk.stores.unregister(name)
                self._stores.pop(name).leave()

    async def _remove(self, trace: str) -> bool:
        """Remove a trace's segments. Returns whether all of them are gone."""
        for store in self._stores.values():
            try:
                # Meanwhile another segment of the trace may come there.
                while moved := store.archived.intersection(store.traces.get(trace, ())):
                    if self._archive is not None:
                        for segment in moved:
                            await anyio.to_thread.run_sync(self._archive.remove, store.store, segment)
                    store.archived -= moved
                store.forget(trace)
            except (ArchiveError, OSError) as error:
                logger.log(self._removals.level, "segments of dropped traces stay for now: %s", error)
                self._removals.next()
                return False
        self._removals.reset()
        return True

    async def _move_ended(self, archive: Archive) -> None:
        """Move the segments of traces that have ended to the archive. Never ends by itself."""
        while True:
            before = time.monotonic() - ARCHIVE_S
            for trace in [trace for trace, ended in self._ended.items() if ended <= before]:
                for store in list(self._stores.values()):
                    for segment in store.kept(trace):
                        if trace not in self._running:
                            await self._move(archive, store, trace, segment)
            await anyio.sleep(LOOK_S)

    async def _move(self, archive: Archive, store: SegmentFolder, trace: str, segment: str) -> None:
        try:
            if segment not in store.archived:
                await anyio.to_thread.run_sync(archive.put, store.store, segment, store.path / segment)
            if segment in store.traces.get(trace, ()):
                store.archived.add(segment)
                store.shed(trace, segment)
            else:
                # Redis has dropped the trace meanwhile.
                await anyio.to_thread.run_sync(archive.remove, store.store, segment)
        except (ArchiveError, OSError) as error:
            logger.log(self._refusals.level, "segments of bulk stay in %s for now: %s", self._settings.folder, error)
            self._refusals.next()
        else:
            self._refusals.reset()

    async def _listen(self, group: TaskGroup) -> None:
        host, _, port = self._settings.listen.rpartition(":")
        listener = await anyio.create_tcp_listener(local_host=host.strip("[]"), local_port=int(port))
        found = listener.extra(anyio.abc.SocketAttribute.local_port)
        token = secrets.token_hex(32)
        self._place = f"{self._settings.advertise or host}:{found}", token
        places = anyio.CapacityLimiter(_CONSUMERS)

        async def serve(stream: SocketStream) -> None:
            async with places:
                with suppress(TimeoutError):
                    await serve_bulk(stream, token, self._read)

        group.start_soon(partial(listener.serve, serve))

    async def _read(self, store: str, segment: str, offset: int, nbytes: int) -> bytes | None:
        found = self._stores.get(store)
        if found is None or nbytes > self._limit.most:
            return None
        if self._in_memory:
            return read_range(found.path, segment, offset, nbytes)
        return await anyio.to_thread.run_sync(read_range, found.path, segment, offset, nbytes)

    def close(self) -> None:
        """Leave the stores to the next engine."""
        for store in self._stores.values():
            store.leave()
        self._stores.clear()


def check_archive(url: str) -> None:
    """Check that an archive takes segments.

    Raises:
        ValueError: it does not.
    """
    try:
        Archive(url).check()
    except (ArchiveError, OSError) as error:
        raise ValueError(f"--bulk-archive: no segments can be moved there: {error}") from error


def check_folder(folder: Path) -> None:
    """Check that stores can be made in a folder. Makes the folder if there is none.

    Raises:
        ValueError: they cannot be.
    """
    try:
        SegmentFolder.create(folder, "", Limit(0)).leave()
    except OSError as error:
        raise ValueError(f"--bulk: no bulk store can be made in {folder}: {error.strerror}") from error


def _bus_id(bus: Bus) -> str:
    """A text that engines of one bus share: an engine takes over the stores of its own bus only."""
    return blake2b(f"{redacted(bus.url)} {bus.keys.prefix}".encode(), digest_size=16).hexdigest()


def _file_system(folder: Path) -> str:
    """The type of the file system that a folder lies on, as Linux names it; empty if that is not known."""
    best, kind = -1, ""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    real = folder.resolve()
    for line in lines:
        fields = line.split()
        mount = fields[4].replace("\\040", " ")
        if real.is_relative_to(mount) and len(mount) >= best and "-" in fields:
            best, kind = len(mount), fields[fields.index("-") + 1]
    return kind
