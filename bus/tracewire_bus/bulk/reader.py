"""Reads ranges of bulk stores: from the store's folder on the same host, else from the engine or from the archive."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread

from tracewire_bus.transport.errors import BusError
from tracewire_bus.wire.bulk_ranges import BulkRange, bulk_digest

from .stores import BulkStores, StorePlace

if TYPE_CHECKING:
    from .archive import ArchiveReader
    from .remote import RemoteStores

__all__ = ["BulkMissing", "BulkReader"]

logger = logging.getLogger("tracewire")

#: How long the reader caches Redis's entry of a store, in seconds.
_AGE_S: Final = 5.0
#: Ranges of at least this many bytes are read on another thread.
_LARGE_BYTES: Final = 512 * 1024


class BulkMissing(BusError, LookupError):
    """The bytes of a range are lost, or cannot be read from this host."""


class BulkReader:
    """Reads ranges of all stores of one bus. Any task may use it.

    Attributes:
        stores: the places of the stores.
    """

    def __init__(self, stores: BulkStores) -> None:
        self.stores = stores
        self._remote: RemoteStores | None = None
        self._places: dict[str, tuple[float, StorePlace | None]] = {}
        self._archives: dict[str, ArchiveReader] = {}
        #: The stores whose last range came from the archive: further ranges are likely to be there as well.
        self._archived: set[str] = set()

    async def read(self, where: BulkRange) -> bytes:
        """The bytes of a range, compared with its digest.

        Raises:
            BulkMissing: the store has no such bytes, is gone, or cannot be reached from here.
            BusUnavailable: Redis does not answer.
        """
        place = await self._place(where.store)
        if where.nbytes < _LARGE_BYTES:
            data, found = _read_and_digest(place, where)
        else:
            # Reading and the digest take milliseconds, in which other traces go on.
            data, found = await anyio.to_thread.run_sync(_read_and_digest, place, where)
        if data is None:
            data = await self._read_elsewhere(place, where)
            found = b"" if data is None else bulk_digest(data)
        if data is None:
            raise BulkMissing(
                f"bulk store {where.store} has no such bytes in {place.path} on this host. They are gone with the "
                "trace or the engine's host, or this is another host or user: engines serve those with --bulk-listen"
            )
        if found != where.digest:
            raise BulkMissing(f"their bytes in bulk store {where.store} do not match the digest in the event")
        return data

    async def _read_elsewhere(self, place: StorePlace, where: BulkRange) -> bytes | None:
        """Ask the engine and the archive, first the one that had the store's last range."""
        ways = [self._read_remote] if place.address else []
        if place.archive:
            ways.insert(0 if where.store in self._archived else len(ways), self._read_archive)
        problems: list[BulkMissing] = []
        for way in ways:
            try:
                data = await way(place, where)
            except BulkMissing as error:
                problems.append(error)
                continue
            if data is not None:
                (self._archived.add if way == self._read_archive else self._archived.discard)(where.store)
                return data
        if problems:
            raise BulkMissing("; ".join(map(str, problems))) from problems[0]
        return None

    async def _read_archive(self, place: StorePlace, where: BulkRange) -> bytes | None:
        from .archive import ArchiveError, ArchiveReader

        archive = self._archives.get(place.archive)
        if archive is None:
            archive = self._archives[place.archive] = ArchiveReader(place.archive)
        try:
            return await anyio.to_thread.run_sync(
                archive.read, where.store, where.segment, where.offset, where.nbytes, abandon_on_cancel=True
            )
        except ArchiveError as error:
            raise BulkMissing(str(error)) from error

    async def _read_remote(self, place: StorePlace, where: BulkRange) -> bytes | None:
        # Imported here, because most clients read no bulk of another host.
        from .remote import RemoteStores, StoreRefused

        if self._remote is None:
            self._remote = RemoteStores()
        try:
            return await self._remote.read(place, where)
        except StoreRefused as error:
            raise BulkMissing(
                f"the engine at {place.address}, which serves bulk store {where.store}, has not sent them: {error}"
            ) from error

    async def _place(self, store: str) -> StorePlace:
        known = self._places.get(store)
        if known is None or known[0] < anyio.current_time() - _AGE_S:
            known = self._places[store] = anyio.current_time(), await self.stores.find(store)
        if known[1] is None:
            raise BulkMissing(f"bulk store {store} is gone with its contents")
        return known[1]

    async def aclose(self) -> None:
        """Close all connections."""
        if self._remote is not None:
            await self._remote.aclose()


def _read_and_digest(place: StorePlace, where: BulkRange) -> tuple[bytes | None, bytes]:
    """The bytes of a range, if they are in the store's folder on this host, and their digest."""
    data = _read_here(place, where)
    return data, b"" if data is None else bulk_digest(data)


def _read_here(place: StorePlace, where: BulkRange) -> bytes | None:
    # Imported here, because most clients read no bulk.
    from .segments import read_range

    try:
        return read_range(place.path, where.segment, where.offset, where.nbytes)
    except OSError as error:
        # A folder of another user, for one. The engine may serve the store.
        logger.debug("bulk store %s cannot be read at %s: %s", where.store, place.path, error)
        return None
