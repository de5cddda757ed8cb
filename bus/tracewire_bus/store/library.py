"""The library: named, versioned entries with arrays, which Redis keeps until they are removed.

A *space* of the library has names of its own: `""` is the shared one, and each tenant has one. The keys of a space are
a few hashes, which only scripts change, and one hash of chunks for each version. A client first uploads the chunks
under a random name, where they expire after an hour. Then a script checks that they are all there, gives them a version
and takes their expiry away. So a version is whole or does not exist, and a client that dies leaves nothing behind.

Numbers of versions are never given twice. A removed version leaves its description: who removed it, and when.

An engine never reads the library. A client puts the arrays of an entry that a trace names among the vectors
(`vectors.py`), where engines fetch them once.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from tracewire_bus.transport.errors import BusError
from tracewire_bus.transport.guard import integer
from tracewire_bus.transport.scripts import Script
from tracewire_bus.wire.arrays import array_from_raw, array_of, raw_bytes
from tracewire_bus.wire.digests import content_hash
from tracewire_bus.wire.library import FORMAT, EntryArray, EntryMessage
from tracewire_bus.wire.packing import decoder
from tracewire_bus.wire.pieces import Pieces
from tracewire_bus.wire.refs import DTYPES, ArrayRef

from .blobs import CHUNK_BYTES, chunk_count
from .keys import Keys

if TYPE_CHECKING:
    import numpy as np

    from tracewire_bus.transport.pool import Connections

__all__ = [
    "MAX_ENTRY_BYTES",
    "EntryMissing",
    "Library",
    "LibraryFull",
    "NewestDiffers",
    "Stored",
    "described",
    "is_entry_name",
    "is_space",
]

#: Most entries of a space, most removed versions of which it keeps the description, and most bytes of a description.
MAX_ENTRIES: Final = 4096
MAX_DESCRIPTIONS: Final = 16384
MAX_DESCRIPTION_BYTES: Final = 256 * 1024
#: Most bytes of the arrays of one entry, and most arrays.
MAX_ENTRY_BYTES: Final = 2 * 1024**3
MAX_ARRAYS: Final = 1024
#: How long Redis keeps chunks that no entry has yet, in seconds.
UPLOAD_S: Final = 3600

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SPACE: Final = re.compile(r"[A-Za-z0-9._-]{0,128}")
_FIELD: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63})@([1-9][0-9]{0,14})")
_PARTS: Final = ("last", "newest", "entries", "about")

_PUT: Final = Script("library_put")
_REMOVE: Final = Script("library_remove")


class EntryMissing(BusError, LookupError):
    """An array of an entry is missing or incomplete, or its content does not match its digest."""


class LibraryFull(BusError):
    """A space of the library has the greatest number of entries."""


class NewestDiffers(BusError):
    """The newest version of a name is not the one that the caller expected.

    Attributes:
        version: the newest version; 0 if the name has none.
    """

    def __init__(self, name: str, version: int) -> None:
        super().__init__(f"{name!r} is at version {version}" if version else f"there is no entry {name!r}")
        self.version = version


class Stored(NamedTuple):
    """A version of a name, as Redis has it.

    Attributes:
        space: the space that it is in.
        name, version: its name, and its number from 1 on.
        time: when it was put, in seconds since the epoch by Redis's clock.
        upload: the name of its arrays.
        entry: what it says, or None if it was removed or cannot be read.
        removed: when it was removed, or None.
        removed_by: the client that removed it.
    """

    space: str
    name: str
    version: int
    time: float
    upload: str
    entry: EntryMessage | None
    removed: float | None = None
    removed_by: str = ""


def is_entry_name(name: str) -> bool:
    """Whether an entry may have this name: 1 to 64 letters, digits, `.`, `_` or `-`, a letter or digit first."""
    return _NAME.fullmatch(name) is not None


def is_space(space: str) -> bool:
    """Whether a space may have this name: that of a tenant, or `""`."""
    return _SPACE.fullmatch(space) is not None


def described(array: Any) -> EntryArray:
    """The description of an array."""
    found = array_of(array)
    state = content_hash(found.dtype.name, found.shape)
    state.update(raw_bytes(found))
    return EntryArray(dtype=found.dtype.name, shape=list(found.shape), digest=state.digest())


class Library:
    """The library of one bus. If the connection breaks, a change is sent again and takes effect once."""

    def __init__(self, connections: Connections, keys: Keys) -> None:
        self._connections = connections
        self._keys = keys

    def _all(self, space: str, upload: str) -> list[str]:
        return [*(self._keys.library(part, space) for part in _PARTS), self._keys.library_arrays(space, upload)]

    # --- writing ------------------------------------------------------------------------------------------------------

    async def put(
        self, space: str, entry: EntryMessage, arrays: Mapping[str, Any], *, replacing: int | None = None
    ) -> int:
        """Put an entry with its arrays, as the next version of its name. Returns the version.

        With `replacing`, the newest version must have that number; 0 means that the name must have none.

        Raises:
            NewestDiffers: the newest version is not `replacing`.
            LibraryFull: the space has the greatest number of entries.
            BusFull: Redis has no memory left.
            BusError: the entry is too large, or Redis refuses.
            BusUnavailable: Redis does not answer; the entry may have been put.
        """
        encoded = msgspec.msgpack.encode(entry)
        if len(encoded) > MAX_DESCRIPTION_BYTES:
            raise BusError(f"what the entry says takes {len(encoded)} bytes, and may take {MAX_DESCRIPTION_BYTES}")
        upload = secrets.token_hex(12)
        chunks = await self._upload(self._keys.library_arrays(space, upload), arrays)
        before = "" if replacing is None else replacing
        command = _PUT(self._all(space, upload), entry.name, encoded, chunks, FORMAT, MAX_ENTRIES, before)
        ((version, other),) = await self._connections.commands(command, refuse_full=True)
        if version == -2:
            raise BusError("Redis has lost some of the arrays meanwhile: put the entry again")
        if version < 0:
            raise LibraryFull(f"the library has {MAX_ENTRIES} entries: remove one first")
        if version == 0:
            raise NewestDiffers(entry.name, other)
        return int(version)

    async def _upload(self, key: str, arrays: Mapping[str, Any]) -> int:
        """Write the chunks of arrays. Returns how many there are."""
        count = 0
        for field, chunk in _chunks(arrays):
            # Idempotent. Each chunk renews the expiry, for large entries on slow connections.
            await self._connections.commands(
                ("HSET", key, field, Pieces([chunk])), ("EXPIRE", key, UPLOAD_S), refuse_full=True
            )
            count += 1
        return count

    async def remove(self, stored: Stored, by: str) -> bool:
        """Remove a version and its arrays. Returns whether it was there.

        Raises:
            BusUnavailable: Redis does not answer; the version may have been removed.
        """
        author = by.replace(" ", "_")
        command = _REMOVE(
            self._all(stored.space, stored.upload),
            *(stored.name, stored.version, author, MAX_DESCRIPTIONS, secrets.token_hex(8)),
        )
        return bool(await self._connections.command(*command))

    # --- reading ------------------------------------------------------------------------------------------------------

    async def load(self, space: str) -> list[Stored]:
        """All versions of all names of a space, removed ones among them, by name and version.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        key = self._keys.library("about", space)
        abouts, entries = await self._connections.commands(
            ("HGETALL", key), ("HGETALL", self._keys.library("entries", space))
        )
        data = dict(zip(entries[::2], entries[1::2], strict=True))
        guard = self._connections.guard
        found = [
            guard.read(_stored, space, field, about, data.get(field), key=key, entry=field)
            for field, about in zip(abouts[::2], abouts[1::2], strict=True)
        ]
        return sorted((one for one in found if one is not None), key=lambda one: (one.name, one.version))

    async def find(self, space: str, name: str, version: int | None = None) -> Stored | None:
        """A version of a name, by default the newest. None if there is none, and one without `entry` if it is removed.

        Raises:
            Malformed: what Redis has cannot be read.
            BusUnavailable: Redis does not answer.
        """
        if version is None:
            key = self._keys.library("newest", space)
            newest = await self._connections.command("HGET", key, name)
            if newest is None:
                return None
            version = self._connections.guard.demand(integer, newest, key=key, entry=name)
        key, field = self._keys.library("about", space), f"{name}@{version}"
        about, data = await self._connections.commands(
            ("HGET", key, field), ("HGET", self._keys.library("entries", space), field)
        )
        if about is None:
            return None
        return self._connections.guard.demand(_stored, space, field.encode(), about, data, key=key, entry=field)

    async def fetch(self, stored: Stored, name: str) -> np.ndarray[Any, Any]:
        """An array of an entry, compared with its digest. The array is read-only.

        Raises:
            EntryMissing: a chunk is missing, or the content does not match the entry.
            BusUnavailable: Redis does not answer.
        """
        if stored.entry is None or name not in stored.entry.arrays:
            raise EntryMissing(f"{stored.name}@{stored.version} has no array {name!r}")
        array = stored.entry.arrays[name]
        nbytes = _nbytes(array)
        key, count = self._keys.library_arrays(stored.space, stored.upload), chunk_count(nbytes)
        raw, state = bytearray(), content_hash(array.dtype, tuple(array.shape))
        for number in range(count):
            chunk = await self._connections.command("HGET", key, f"{name}:{number}", unbatched=True)
            if chunk is None:
                raise EntryMissing(f"{stored.name}@{stored.version}: chunk {number} of {name!r} is missing")
            raw += chunk
            state.update(chunk)
            if len(raw) > nbytes:
                break
        if len(raw) != nbytes or state.digest() != array.digest:
            raise EntryMissing(f"{stored.name}@{stored.version}: {name!r} does not match its digest")
        return array_from_raw(array.dtype, tuple(array.shape), raw)


def _chunks(arrays: Mapping[str, Any]) -> Iterator[tuple[str, memoryview]]:
    for name, array in arrays.items():
        raw = memoryview(raw_bytes(array_of(array))).cast("B")
        for number in range(chunk_count(len(raw))):
            yield f"{name}:{number}", raw[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]


def _nbytes(array: EntryArray) -> int:
    return ArrayRef(array.dtype, tuple(array.shape), array.digest, "").nbytes


_decode_entry = decoder(EntryMessage, plain=True)


def _stored(space: str, field: bytes, about: bytes, data: bytes | None) -> Stored:
    """A version from its field and its description.

    Raises:
        ValueError: it is malformed, or of a newer form.
    """
    named = _FIELD.fullmatch(field.decode())
    if named is None:
        raise ValueError("no version of an entry has such a field")
    time, upload, form, *rest = about.decode().split(" ")
    found = Stored(space, named[1], integer(named[2]), integer(time) / 1000, upload, None)
    if rest:
        removed, _, by = rest
        return found._replace(removed=integer(removed) / 1000, removed_by=by)
    if integer(form) > FORMAT:
        raise ValueError(f"a newer version of Tracewire has put it (form {form})")
    if data is None or len(data) > MAX_DESCRIPTION_BYTES:
        raise ValueError("its entry is missing or too large")
    entry = _decode_entry(data)
    if entry.name != found.name or len(entry.arrays) > MAX_ARRAYS:
        raise ValueError("its entry is of another name, or has too many arrays")
    for array in entry.arrays.values():
        if array.dtype not in DTYPES or _nbytes(array) > MAX_ENTRY_BYTES:
            raise ValueError("an array of its entry cannot be")
    return found._replace(entry=entry)
