"""`client.library`: puts, finds, loads and removes the entries of the library."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import anyio.to_thread

from tracewire.admin.listing import Listing
from tracewire.checks import check_text, shown
from tracewire.error_mapping import bus_errors
from tracewire.errors import EntryConflict, InvalidEntry, UnknownEntry
from tracewire.options import check_names
from tracewire.traces.library_names import EntryName, parsed
from tracewire_bus.domain.autoencoders import SparseAutoencoder
from tracewire_bus.store.library import EntryMissing, LibraryFull, NewestDiffers, Stored

from . import autoencoders
from .entry import EntryOptions, LibraryEntry, checked_message

if TYPE_CHECKING:
    from tracewire.traces.session import Session

__all__ = ["Library"]


class Library:
    """The library, as `Client.library` returns it. It caches no names: each call asks Redis.

    A name is `"calm"`, the newest version, or `"calm@3"`. A tenant's names have the tenant before them: `"red:calm"`.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def __repr__(self) -> str:
        return "<Library>"

    async def put(self, name: str, arrays: Any, **options: Unpack[EntryOptions]) -> LibraryEntry:
        """Put an entry, as the next version of its name. Redis keeps it until it is removed.

            await client.library.put("calm", direction, model="demo", at="residual(4)", licence="MIT")

        `arrays` is one array, or a dict of one by layer: a vector `[hidden]`, a subspace's rows `[directions, hidden]`,
        or a probe's weight `[hidden]` or `[outputs, hidden]`. A probe with a bias is a dict of `weight` and `bias`, an
        autoencoder a `SparseAutoencoder`, or a dict of arrays by name. `EntryOptions` lists what an entry says.

        Raises:
            InvalidEntry: the name, an array or an option is wrong; `field` names it.
            EntryConflict: the newest version is not `replacing`, or the library is full.
            BusFull: Redis has no memory left.
            BusUnavailable: Redis does not answer; the entry may have been put.
        """
        check_names(options, EntryOptions)
        asked = parsed(check_text("name", name))
        if asked is None or asked.version is not None:
            raise InvalidEntry(
                name,
                "name",
                f"expected up to 64 letters, digits, '.', '_' or '-', without a version, got {shown(name)}",
            )
        replacing = options.get("replacing")
        if replacing is not None and (type(replacing) is not int or replacing < 0):
            raise InvalidEntry(name, "replacing", f"expected a version's number, or 0 for none, got {shown(replacing)}")
        given: dict[str, Any] = {**options}
        if isinstance(arrays, SparseAutoencoder):
            arrays, said = await anyio.to_thread.run_sync(autoencoders.taken_apart, arrays)
            given = {**said, **given}
        message, own = checked_message(asked.name, arrays, given, self._session.name)
        library = self._session.open_bus().library
        with bus_errors():
            try:
                version = await library.put(asked.space, message, own, replacing=replacing)
            except (NewestDiffers, LibraryFull) as error:
                raise EntryConflict(name, str(error), getattr(error, "version", 0)) from None
        return await self.get(str(EntryName(asked.space, asked.name, version)))

    async def get(self, name: str) -> LibraryEntry:
        """What an entry says.

        Raises:
            UnknownEntry: there is no such entry, or it was removed.
            BusUnavailable: Redis does not answer.
        """
        return LibraryEntry.of(await self._find(name))

    async def load(self, name: str) -> dict[str, Any]:
        """The arrays of an entry by name, NumPy's, as copies.

        A vector's is called `vector`, a subspace's `basis`, a probe's `weight` and perhaps `bias`; for a layer of
        several, `.` and the layer follow (`vector.12`).

        Raises:
            UnknownEntry: there is no such entry, or it was removed, or Redis has lost its arrays.
            BusUnavailable: Redis does not answer.
        """
        stored = await self._find(name)
        assert stored.entry is not None
        library = self._session.open_bus().library
        with bus_errors():
            try:
                return {key: (await library.fetch(stored, key)).copy() for key in stored.entry.arrays}
            except EntryMissing as error:
                raise UnknownEntry(name, f"its arrays are gone: {error}") from None

    async def autoencoder(self, name: str) -> SparseAutoencoder:
        """The sparse autoencoder of an entry, for `Features` and `SteerFeatures`.

        Raises:
            UnknownEntry: there is no such entry, or it was removed, or Redis has lost its arrays.
            InvalidEntry: the entry is no autoencoder, or its settings are not supported.
            LibraryMissing: the extra `tracewire[library]` is not installed.
            BusUnavailable: Redis does not answer.
        """
        entry = await self.get(name)
        arrays = await self.load(entry.id)
        return await anyio.to_thread.run_sync(autoencoders.made, entry, arrays)

    def list(self, tenant: str = "") -> Listing[LibraryEntry]:
        """All versions that are there, by name and version: those of a `tenant`, then the shared ones."""

        async def pages() -> AsyncIterator[Sequence[LibraryEntry]]:
            for space in dict.fromkeys((check_text("tenant", tenant), "")):
                yield [LibraryEntry.of(one) for one in await self._load(space) if one.entry is not None]

        return Listing(pages)

    def history(self, name: str) -> Listing[LibraryEntry]:
        """All versions of a name, the newest first, with the removed ones: those say when, and by which client."""

        async def pages() -> AsyncIterator[Sequence[LibraryEntry]]:
            asked = self._parsed(name)
            found = [LibraryEntry.of(one) for one in await self._load(asked.space) if one.name == asked.name]
            yield found[::-1]

        return Listing(pages)

    async def remove(self, name: str) -> Sequence[str]:
        """Remove one version, or with a name alone all of its versions. Returns the ids of those removed.

        Running traces keep the arrays that they began with. Numbers of versions are never given again.

        Raises:
            UnknownEntry: there is no such entry, or it was removed before.
            BusUnavailable: Redis does not answer; some may have been removed.
        """
        asked = self._parsed(name)
        library = self._session.open_bus().library
        if asked.version is not None:
            chosen = [await self._find(name)]
        else:
            chosen = [one for one in await self._load(asked.space) if one.name == asked.name and one.entry is not None]
        with bus_errors():
            removed = [one for one in chosen if await library.remove(one, self._session.name)]
        if not removed:
            raise UnknownEntry(name)
        return [str(EntryName(one.space, one.name, one.version)) for one in removed]

    async def _load(self, space: str) -> Sequence[Stored]:
        with bus_errors():
            return await self._session.open_bus().library.load(space)

    async def _find(self, name: str) -> Stored:
        asked = self._parsed(name)
        with bus_errors():
            stored = await self._session.open_bus().library.find(asked.space, asked.name, asked.version)
        if stored is None:
            raise UnknownEntry(name)
        if stored.entry is None:
            raise UnknownEntry(name, f"{stored.removed_by} has removed it")
        return stored

    @staticmethod
    def _parsed(name: str) -> EntryName:
        asked = parsed(check_text("name", name))
        if asked is None:
            raise InvalidEntry(name, "name", f"expected a name as 'calm', 'calm@3' or 'red:calm', got {shown(name)}")
        return asked
