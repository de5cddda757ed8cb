"""Standing interventions (*edits*): those installed on all engines of a model, and the streams of their saves.

A model's edits are a few hashes under the model's hash tag, which only scripts change. Each change has a number, the
*generation*. The version of an edit is the generation that installed it. An engine reads all edits when it starts and
whenever the generation has changed; a stream wakes it. The engine's registry entry says which generation it runs. The
stream also has the id of each change's operation: if a reply is lost and the command is sent again, the script finds
the operation there and replies its outcome.

An edit also runs on requests that are not traces. Their saves go to a stream of the edit, one entry for each choice of
a request. The stream is bounded in bytes and expires a day after its last entry, so a late reader misses entries.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeAlias

import anyio
import msgspec

from tracewire_bus.domain.identity import Key
from tracewire_bus.domain.limits import LimitExceeded, measure
from tracewire_bus.transport.backoff import Backoff
from tracewire_bus.transport.errors import BusError, as_bus_error, is_transient
from tracewire_bus.transport.guard import integer
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.scripts import Script
from tracewire_bus.wire.codec import (
    NewerSchema,
    check_schema,
    decode_edit,
    decode_edit_record,
    encode,
    request_schema_text,
    schema_text,
)
from tracewire_bus.wire.ids import parse_id
from tracewire_bus.wire.messages import REQUEST_SCHEMA, Edit, EditRecord
from tracewire_bus.wire.signing import unwrap

from .keys import Keys
from .proofs import Proofs, removal_content

__all__ = [
    "EDIT_BYTES",
    "RECORD_BYTES",
    "EditRecords",
    "EditSet",
    "Edits",
    "EditsFull",
    "Installed",
    "LastChange",
    "UnknownEdit",
    "VersionDiffers",
    "is_edit_name",
    "selected",
]

logger = logging.getLogger("tracewire")

#: Most edits of a model, and most bytes of one. Each request carries the edits that run on it.
MAX_EDITS: Final = 64
EDIT_BYTES: Final = 4 * 1024 * 1024
#: The size in bytes up to which an edit needs no check of its decoded size.
_SMALL_BYTES: Final = 8 * 1024
#: Most bytes of one entry of an edit's stream, and of the whole stream.
RECORD_BYTES: Final = 4 * 1024 * 1024
STREAM_BYTES: Final = 64 * 1024 * 1024
#: How long Redis keeps an edit's stream after its last entry, in seconds.
KEEP_S: Final = 24 * 3600
_PAGE: Final = 64
#: How often a signed removal begins again because the edit was replaced meanwhile.
_TRIES: Final = 5
_BLOCK_MS: Final = 5000

_PARTS: Final = ("state", "entries", "about", "disabled", "changes", "removed")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_INSTALL: Final = Script("edit_install")
_REMOVE: Final = Script("edit_remove")
_DISABLE: Final = Script("edit_disable")
_LOAD: Final = Script("edit_load")
_PUBLISH: Final = Script("edit_publish")


Admit: TypeAlias = Callable[[str, bytes, float], tuple[bytes, Key | None]]


class UnknownEdit(BusError):
    """The model has no edit of this name, or none of this version."""


class VersionDiffers(BusError):
    """The installed version of the edit is not the version that the caller expected."""

    def __init__(self, name: str, version: int) -> None:
        super().__init__(f"edit {name!r} is at version {version}" if version else f"there is no edit {name!r}")
        #: The installed version; 0 if there is no such edit.
        self.version = version


class EditsFull(BusError):
    """The model has the greatest number of edits."""


class Installed(msgspec.Struct, frozen=True):
    """An installed edit.

    Attributes:
        name: its name.
        version: the generation of the model's edits that installed it.
        time: when it was installed, in seconds since the epoch by Redis's clock.
        edit: the edit, or None if this version cannot read it.
        signer: the key that has signed it, if the reader has verified that.
        problem: why this version cannot read it; `""` if it can.
        disabled: why engines have disabled it; `""` if it is enabled.
    """

    name: str
    version: int
    time: float
    edit: Edit | None
    problem: str = ""
    disabled: str = ""
    signer: Key | None = None


class EditSet(msgspec.Struct, frozen=True):
    """All edits of a model at one moment, in the order in which their names were first installed.

    `removals` has the version and the signature of the last removal, by name.
    """

    generation: int
    edits: tuple[Installed, ...]
    removals: dict[str, tuple[int, bytes]] = {}


class LastChange(NamedTuple):
    """The last change of a model's edits: its number, its place in the stream of changes, and its operation's id.

    A Redis that has lost changes gives their numbers to others. Two changes of one number have different operations.
    """

    generation: int
    id: bytes
    operation: bytes


def is_edit_name(name: str) -> bool:
    """Whether an edit may have this name: 1 to 64 letters, digits, `.`, `_` or `-`, a letter or digit first."""
    return _NAME.fullmatch(name) is not None


def selected(scope: str, name: str, asked: list[str] | None) -> bool:
    """Whether an edit of this scope and name runs on a request that names the edits `asked` (None: it names none)."""
    if asked is None:
        return scope in ("all", "default")
    return scope == "all" or name in asked


def _operation() -> str:
    """A random id for an operation. A script ignores a second operation of the same id."""
    return secrets.token_hex(8)


class Edits:
    """The edits of all models. If the connection breaks, a change is sent again and takes effect once."""

    def __init__(self, connections: Connections, keys: Keys, proofs: Proofs | None = None) -> None:
        self._connections = connections
        self._keys = keys
        self._proofs = proofs or Proofs()

    def _all(self, model: str) -> list[str]:
        return [self._keys.edits(model, part) for part in _PARTS]

    async def install(self, model: str, edit: Edit, *, replacing: int | None = None) -> int:
        """Install an edit, in place of an installed edit of its name. Returns its version.

        With `replacing`, the installed edit must have that version; 0 means that there must be none.

        Raises:
            VersionDiffers: the installed version is not `replacing`.
            EditsFull: the model has the greatest number of edits.
            BusError: the edit is too large, or Redis refuses.
            BusUnavailable: Redis does not answer; the edit may have been installed.
        """
        data = encode(edit)
        if len(data) > EDIT_BYTES:
            raise BusError(f"the edit takes {len(data)} bytes, and may take {EDIT_BYTES}")
        data = self._proofs.content("edit", model, edit.name, data)
        before = "" if replacing is None else replacing
        command = _INSTALL(self._all(model), edit.name, data, before, request_schema_text(), MAX_EDITS, _operation())
        version, other = await self._connections.command(*command)
        if version < 0:
            raise EditsFull(f"{model!r} has {MAX_EDITS} edits: remove one first")
        if version == 0:
            raise VersionDiffers(edit.name, other)
        return int(version)

    async def remove(self, model: str, name: str, *, version: int | None = None) -> int:
        """Remove an edit; with `version`, only that version. Returns the generation of the removal.

        Raises:
            UnknownEdit: the model has no such edit.
            BusUnavailable: Redis does not answer; the edit may have been removed.
        """
        for _ in range(_TRIES):
            # A signature is for one version, so that nobody can use it again for a later one.
            one = version if version is not None or self._proofs.signer is None else await self._version(model, name)
            proof = b"" if one is None else self._proofs.order("remove edit", name, removal_content(model, one))
            command = _REMOVE(self._all(model), name, "" if one is None else one, _operation(), proof)
            generation = int(await self._connections.command(*command))
            if generation or one == version or not one:
                break
        if not generation:
            raise UnknownEdit(f"there is no edit {name!r} on {model!r}" + (f" at version {version}" if version else ""))
        return generation

    async def _version(self, model: str, name: str) -> int:
        """The installed version of an edit; 0 if there is none."""
        key = self._keys.edits(model, "about")
        about = await self._connections.command("HGET", key, name)
        words = (about or b"").decode("utf-8", "replace").split(" ")
        return self._connections.guard.read(integer, words[1], key=key, entry=name) or 0 if len(words) > 1 else 0

    async def disable(self, model: str, name: str, version: int, reason: str) -> bool:
        """Disable an edit of this version on all engines. Returns False if it was disabled or replaced before."""
        command = _DISABLE(self._all(model), name, version, reason, _operation())
        return bool(await self._connections.command(*command))

    async def load(self, model: str, admit: Admit | None = None) -> EditSet:
        """All edits of a model.

        Args:
            model: the model.
            admit: verifies the signature in front of the edit of a name, before the edit is decoded. Returns the edit
                behind it and the key, and raises a `ValueError` for an edit that is to be refused. By default nothing
                is verified. It gets the name, the bytes, and when they were installed, in seconds since the epoch.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        generation, entries, abouts, disabled, removed = await self._connections.command(
            *_LOAD(self._all(model)), unbatched=True
        )
        why = _by_name(disabled)
        told = _by_name(abouts)
        admitted = {
            name: _admitted(name, raw, told.get(name, b""), admit or _admit_all)
            for name, raw in _by_name(entries).items()
        }
        data = {name: one[0] for name, one in admitted.items()}
        for name, raw in data.items():
            if _SMALL_BYTES < len(raw) <= EDIT_BYTES and await anyio.to_thread.run_sync(_is_too_much, raw):
                data[name] = b""
        guard, key = self._connections.guard, self._keys.edits(model, "about")
        found = [
            one
            for raw, about in told.items()
            if (one := guard.read(_installed, raw, about, data.get(raw), why.get(raw, b""), key=key, entry=raw))
        ]
        found = [(place, _signed(one, admitted.get(one.name.encode()))) for place, one in found]
        number = guard.read(integer, generation, key=self._keys.edits(model, "state"), entry="generation")
        ordered = [one for _, one in sorted(found, key=lambda pair: pair[0])]
        if len(ordered) > MAX_EDITS:
            guard.note(key, "", f"it has {len(ordered)} edits, and may have {MAX_EDITS}")
        removals = {name.decode("utf-8", "replace"): _removal(told) for name, told in _by_name(removed).items()}
        return EditSet(number or 0, tuple(ordered[:MAX_EDITS]), removals)

    async def generation(self, model: str) -> int:
        """The number of the last change of a model's edits; 0 before the first.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        return (await self.last_change(model)).generation

    async def last_change(self, model: str) -> LastChange:
        """The last change of a model's edits; before the first, one of the number 0.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        state, changes = self._keys.edits(model, "state"), self._keys.edits(model, "changes")
        found, entries = await self._connections.commands(
            ("HGET", state, "generation"), ("XREVRANGE", changes, "+", "-", "COUNT", 1)
        )
        number = self._connections.guard.read(integer, found or 0, key=state, entry="generation") or 0
        id_, flat = entries[0] if entries else (b"", [])
        return LastChange(number, id_, _by_name(flat).get(b"o", b""))

    def changes(self, model: str) -> EditChanges:
        """Waits for changes of a model's edits. The caller closes it."""
        return EditChanges(self._connections, self._keys.edits(model, "changes"))

    async def publish(self, model: str, edit: str, record: bytes) -> None:
        """Append an encoded `EditRecord` to the stream of an edit.

        Raises:
            BusError: Redis refuses.
            BusUnavailable: Redis does not answer; the record may have been appended.
        """
        keys = [self._keys.edit_saves(model, edit), self._keys.edit_sizes(model)]
        await self._connections.command(*_PUBLISH(keys, edit, STREAM_BYTES, KEEP_S, schema_text(), record))

    def records(self, model: str, edit: str, since: str = "now") -> EditRecords:
        """Follow the saves of an edit from `since` on: `"start"`, `"now"`, or the id of an entry. The caller closes it.

        Raises:
            ValueError: `since` is none of these.
        """
        return EditRecords(self._connections, self._keys.edit_saves(model, edit), since)


def _admit_all(name: str, data: bytes, installed_at: float) -> tuple[bytes, None]:
    try:
        return unwrap(data)[1], None
    except ValueError as error:
        raise ValueError(f"it cannot be read: {error}") from None


def _admitted(name: bytes, data: bytes, about: bytes, admit: Admit) -> tuple[bytes, Key | None, str]:
    """An encoded edit, the key that has signed it, and why it is refused if it is."""
    try:
        return *admit(name.decode(), data, integer(about.decode().split(" ", 3)[2]) / 1000), ""
    except (ValueError, IndexError) as error:
        return b"", None, str(error)


def _signed(one: Installed, admitted: tuple[bytes, Key | None, str] | None) -> Installed:
    if admitted is None:
        return one
    _, signer, problem = admitted
    edit = None if problem else one.edit
    return msgspec.structs.replace(one, edit=edit, problem=problem or one.problem, signer=signer)


def _removal(told: bytes) -> tuple[int, bytes]:
    version, _, proof = told.partition(b" ")
    return (int(version), proof) if version.isdigit() and len(version) < 16 else (0, b"")


def _is_too_much(data: bytes) -> bool:
    try:
        measure(data, "edit")
    except LimitExceeded:
        return True
    return False


def _installed(name: bytes, about: bytes, data: bytes | None, disabled: bytes) -> tuple[int, Installed]:
    """An edit behind its place in the order of edits. `problem` says why an unreadable edit cannot run.

    Raises:
        ValueError: its name or its entry in `about` is malformed.
    """
    text = name.decode()
    if not is_edit_name(text):
        raise ValueError("no edit has such a name")
    place, version, time, schema = about.decode().split(" ", 3)
    edit, problem = None, ""
    try:
        check_schema(schema, REQUEST_SCHEMA)
        if data is None:
            raise ValueError("its entry is missing")
        if len(data) > EDIT_BYTES:
            raise ValueError(f"it takes {len(data)} bytes, and may take {EDIT_BYTES}")
        edit = decode_edit(data)
        if edit.name != text:
            problem = f"its entry names {text!r}, its body {edit.name!r}"
            edit = None
    except (NewerSchema, ValueError) as error:
        problem = f"it cannot be read: {error}"
    reason = disabled.decode("utf-8", "replace")
    return integer(place), Installed(text, integer(version), integer(time) / 1000, edit, problem, reason)


def _by_name(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _record(flat: list[bytes]) -> EditRecord:
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    check_schema(fields.get(b"v", b"").decode("ascii", "replace"))
    return decode_edit_record(fields.get(b"d", b""))


class EditChanges:
    """Waits for changes of a model's edits, over a link of its own. Not for concurrent use."""

    def __init__(self, connections: Connections, key: str) -> None:
        self._link = connections.link(key)
        self._key = key
        self._position = b"0-0"

    async def wait(self, block_ms: int) -> None:
        """Wait for a change since the last call, for up to `block_ms` milliseconds. It may return without a change.

        Raises:
            BusError: Redis refuses.
        """
        try:
            (reply,) = await self._link.execute(
                ("XREAD", "BLOCK", block_ms, "STREAMS", self._key, self._position), timeout_s=block_ms / 1000 + 30
            )
            if isinstance(reply, Exception):
                raise reply
            for _, entries in reply or ():
                self._position = entries[-1][0]
        except Exception as error:
            if not is_transient(error):
                raise as_bus_error(error) from error
            logger.debug("edits wait for Redis: %s", error)
            await anyio.sleep(block_ms / 1000)

    async def aclose(self) -> None:
        """Close the connection."""
        await self._link.drop()


class EditRecords:
    """An async iterator over the entries of an edit's stream, each with its id. It never ends by itself."""

    def __init__(self, connections: Connections, key: str, since: str) -> None:
        if since not in ("start", "now"):
            parse_id(since)
        self._link = connections.link(key)
        self._key = key
        self._parse = connections.guard.read
        #: Id of the last entry that was read; `""` until a subscription since `"now"` has started.
        self.position = "0-0" if since == "start" else "" if since == "now" else since
        self._buffer: deque[tuple[str, EditRecord]] = deque()
        self._guard = anyio.ResourceGuard("waiting for the next record of")
        self._closed = False

    async def start(self) -> None:
        """Find the stream's end, if `since` is `"now"`. Idempotent. Waits while Redis does not answer.

        Raises:
            BusError: Redis refuses.
        """
        if not self.position:
            entries = await self._ask(("XREVRANGE", self._key, "+", "-", "COUNT", 1))
            self.position = entries[0][0].decode() if entries else "0-0"

    async def _ask(self, command: tuple[Any, ...]) -> Any:
        backoff = Backoff()
        while True:
            if self._closed:
                raise anyio.ClosedResourceError
            try:
                (reply,) = await self._link.execute(command, timeout_s=_BLOCK_MS / 1000 + 30)
                if isinstance(reply, Exception):
                    raise reply
                return reply
            except Exception as error:
                if not is_transient(error):
                    raise as_bus_error(error) from error
                pause = backoff.next()
                logger.log(backoff.level, "records of an edit wait for Redis: %s", error)
                await anyio.sleep(pause)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[str, EditRecord]:
        with self._guard:
            await self.start()
            while not self._buffer:
                read = ("XREAD", "COUNT", _PAGE, "BLOCK", _BLOCK_MS, "STREAMS", self._key, self.position)
                for _, entries in await self._ask(read) or ():
                    self._take(entries)
            id_, record = self._buffer.popleft()
            self.position = id_
            return id_, record

    def _take(self, entries: list[Any]) -> None:
        for id_, flat in entries:
            self.position = id_.decode()
            record = self._parse(_record, flat, key=self._key, entry=id_)
            if record is not None:
                self._buffer.append((self.position, record))

    async def aclose(self) -> None:
        """Close the connection. Idempotent."""
        self._closed = True
        with anyio.CancelScope(shield=True):
            await self._link.drop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
