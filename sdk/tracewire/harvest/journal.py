"""The journal of a harvest: one entry a shard. Only an entry makes the shard's files a part of the harvest.

An entry is one file, put in one piece under the next number, and never changed. If its number is taken, another client
writes to the harvest, and the client stops. So no prompt is in two shards. A later entry may withdraw the shard of an
earlier one (`drops`), and lists again the prompts that had failed.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import msgspec
from xxhash import xxh3_128

from tracewire.errors import HarvestConflict, HarvestMissing, ShardDamaged, TracewireError

from .pieces import Piece, raw
from .stores import Store

__all__ = ["Entry", "Failed", "File", "Journal", "checked_file", "digest", "file_digest"]

HEAD = "harvest.json"
_ENTRY = re.compile(r"journal/(\d{6,})\.json")
_NUMBERED = re.compile(r"(?:journal|shards)/\.?(\d{6,})\b.*")
#: The form of these files. A reader of an older one refuses a newer one. In the first one, files have a `digest`.
FORMAT, _OLDER = 2, 1
#: What a `file_digest` begins with.
_XXH3 = "xxh3:"


def digest(*pieces: Piece) -> str:
    """A digest of 16 bytes, in hexadecimal, of all pieces together."""
    state = blake2b(digest_size=16)
    for piece in pieces:
        state.update(raw(piece))
    return state.hexdigest()


def file_digest(*pieces: Piece) -> str:
    """A digest of a file of these pieces, quick enough for any disk: it finds damage, and no forgery."""
    state = xxh3_128()
    for piece in pieces:
        state.update(raw(piece))
    return f"{_XXH3}{state.hexdigest()}"


class File(msgspec.Struct):
    """A file of a shard: its name below the harvest's URL, its size in bytes, and its `file_digest`."""

    name: str
    bytes: int
    digest: str


class Failed(msgspec.Struct, omit_defaults=True):
    """A prompt whose trace failed: its key, the digest of the prompt, and the error's class, field and message."""

    prompt: int | str
    digest: str
    type: str
    message: str
    field: str = ""


class Tensor(msgspec.Struct, omit_defaults=True):
    """A tensor of a shard: the saved name, the layer and the location that it is of, and what it holds."""

    name: str
    dtype: str
    shape: list[int]
    layer: int | None = None
    location: str = ""
    part: str = ""


class Entry(msgspec.Struct, omit_defaults=True):
    """The journal's entry of one shard.

    `prompts` are the keys of its prompts, `digests` those of the prompts themselves. `drops` are the numbers of shards
    that this entry withdraws.
    """

    number: int
    shard: str = ""
    files: list[File] = []
    prompts: list[int | str] = []
    digests: list[str] = []
    failed: list[Failed] = []
    tensors: dict[str, Tensor] = {}
    drops: list[int] = []
    tokens: int = 0
    bytes: int = 0


class Journal:
    """The journal of the harvest in a store, as it was last read.

    Attributes:
        head: what was harvested, as `harvest.json` says.
        entries: the shards that count, by number.
        done: the digest of each prompt that is in a shard, by key.
        failed: the prompts that failed and are in no shard, by key.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.head: dict[str, Any] = {}
        self.entries: dict[int, Entry] = {}
        self.done: dict[int | str, str] = {}
        self.failed: dict[int | str, Failed] = {}
        self.next = 0
        #: All entries, those of withdrawn shards among them.
        self._all: dict[int, Entry] = {}

    def read(self) -> None:
        """Read the head and all entries.

        Raises:
            HarvestMissing: there is no harvest.
            HarvestConflict: a newer version wrote it, or an entry is missing among the others.
            ShardDamaged: an entry is cut short.
        """
        try:
            head = self.store.read(HEAD)
        except FileNotFoundError:
            raise HarvestMissing(self.store.url) from None
        self.head = self._decoded_head(head)
        numbers = sorted(int(found[1]) for name in self.store.sizes("journal") if (found := _ENTRY.fullmatch(name)))
        if numbers != list(range(len(numbers))):
            gone = min(set(range(numbers[-1])) - set(numbers))
            raise ShardDamaged(self.store.url, _name(gone), 0, "it is missing, and later ones are there")
        for number in numbers:
            self._take(self._decoded(number))

    def exists(self) -> bool:
        """Whether there is a harvest."""
        try:
            self.store.read(HEAD)
        except FileNotFoundError:
            return False
        return True

    def open(self, head: Mapping[str, Any], remarks: Mapping[str, Any]) -> None:
        """Read the journal, or begin one. An existing journal must have the same head; `remarks` may differ.

        Raises:
            HarvestConflict: there is one of something else.
        """
        try:
            self.read()
        except HarvestMissing:
            self.head = {"format": FORMAT, **head, **remarks}
            try:
                self.store.create(HEAD, json.dumps(self.head, indent=2).encode() + b"\n")
            except FileExistsError:
                raise self._another() from None
            return
        for field, asked in head.items():
            if self.head.get(field) != asked:
                raise HarvestConflict(
                    self.store.url,
                    f"it is a harvest with another {field}: there {_short(self.head.get(field))}, "
                    f"now {_short(asked)} (take another place, or the same {field})",
                )

    def commit(self, entry: Entry) -> None:
        """Append an entry: its shard is a part of the harvest from now on.

        A store may write an entry and fail all the same: its answer is lost, or it sees its own first try. So the
        journal reads an entry back whose write failed.

        Raises:
            HarvestConflict: another client has appended one meanwhile.
            TracewireError: the store fails, and the entry may or may not be there.
        """
        entry.number = self.next
        try:
            self.store.create(_name(entry.number), msgspec.json.encode(entry) + b"\n")
        except FileExistsError:
            # An entry that cannot be read is no conflict: it may be this client's.
            self._see_that_it_is_own(entry, self._decoded(entry.number))
        except TracewireError as error:
            try:
                found = self._decoded(entry.number)
            except TracewireError:
                raise error from None
            self._see_that_it_is_own(entry, found)
        self._take(entry)

    def shard_name(self) -> str:
        """A name for the next shard, which no other client takes."""
        return f"{self.next:06}-{uuid.uuid4().hex[:8]}"

    def damaged(self) -> dict[int, ShardDamaged]:
        """The shards of which a file is missing or has another size, by number."""
        sizes = self.store.sizes("shards")
        found = {}
        for number, entry in self.entries.items():
            for file in entry.files:
                reason = _wrong_size(file, sizes.get(file.name))
                if reason:
                    found[number] = ShardDamaged(self.store.url, file.name, len(entry.prompts), reason)
        return found

    def drop(self, numbers: list[int]) -> None:
        """Withdraw shards: their prompts leave the harvest."""
        self.commit(Entry(self.next, drops=numbers))

    def sweep(self) -> int:
        """Remove files that no entry lists or can list. Returns how many.

        A killed client left them, or one whose number another client took. Files of the next number stay: another
        client may be writing them.
        """
        listed = {file.name for entry in self.entries.values() for file in entry.files}
        listed |= {_name(number) for number in self._all}
        removed = 0
        for folder in ("shards", "journal"):
            for name in self.store.sizes(folder):
                found = _NUMBERED.fullmatch(name)
                if found is not None and name not in listed and int(found[1]) < self.next:
                    self.store.remove(name)
                    removed += 1
        return removed

    def _see_that_it_is_own(self, entry: Entry, found: Entry) -> None:
        """Raise the conflict, unless the entry in the store names the shard of this one: no other client does."""
        if not entry.shard or found.shard != entry.shard:
            raise self._another() from None

    def _take(self, entry: Entry) -> None:
        self._all[entry.number] = entry
        self.next = entry.number + 1
        if entry.files:
            self.entries[entry.number] = entry
        for key, of in zip(entry.prompts, entry.digests, strict=True):
            self.done[key] = of
            self.failed.pop(key, None)
        self.failed.update({one.prompt: one for one in entry.failed})
        for number in entry.drops:
            dropped = self.entries.pop(number, None)
            for key in dropped.prompts if dropped is not None else ():
                self.done.pop(key, None)

    def _decoded_head(self, data: bytes) -> dict[str, Any]:
        try:
            head = json.loads(data)
            version = head["format"]
        except (ValueError, TypeError, KeyError) as error:
            raise ShardDamaged(self.store.url, HEAD, 0, f"it is no JSON of a harvest: {error}") from None
        if version not in (FORMAT, _OLDER):
            message = f"it has format {version}, and this client reads {FORMAT}"
            raise HarvestConflict(self.store.url, f"{message} (a newer tracewire wrote it: update this one)")
        return dict(head)

    def _decoded(self, number: int) -> Entry:
        try:
            return msgspec.json.decode(self.store.read(_name(number)), type=Entry)
        except (msgspec.MsgspecError, FileNotFoundError) as error:
            raise ShardDamaged(self.store.url, _name(number), 0, f"it is no entry: {error}") from None

    def _another(self) -> HarvestConflict:
        return HarvestConflict(
            self.store.url,
            "another client writes to it now; this one has stopped (one client at a time writes to a place)",
        )

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())


def checked_file(store: Store, entry: Entry, file: File) -> bytes:
    """A file's bytes, compared with the digest in the shard's entry.

    Raises:
        ShardDamaged: the file is missing, or has other bytes than were written.
    """
    try:
        data = store.read(file.name)
    except FileNotFoundError:
        raise ShardDamaged(store.url, file.name, len(entry.prompts), "it is missing") from None
    reason = _wrong_size(file, len(data))
    found = file_digest if file.digest.startswith(_XXH3) else digest
    if not reason and found(data) != file.digest:
        reason = "its bytes are others than were written"
    if reason:
        raise ShardDamaged(store.url, file.name, len(entry.prompts), reason)
    return data


def _wrong_size(file: File, size: int | None) -> str:
    if size is None:
        return "it is missing"
    return f"it has {size} bytes and should have {file.bytes}" if size != file.bytes else ""


def _name(number: int) -> str:
    return f"journal/{number:06}.json"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
