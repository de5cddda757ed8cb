"""Standing interventions: what is installed on all engines of a model, and the streams of what it leaves.

A model's edits are a few hashes under its hash tag that scripts alone change, each as a whole. Every change has a
number, the *generation*, which is the version of the edit that it installed. Engines read all edits at once when they
start and whenever the generation is another; a stream wakes them. In the registry they say which generation they run.
The stream also says which operation made a change, so that one which is sent again, because its reply was lost, is told
what it came to.

What an edit leaves on requests that are no traces stands on a stream of its own, an entry a choice of a request. The
stream is bounded in bytes, and goes a day after its last entry: who reads it later misses what was trimmed.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections import deque
from types import TracebackType
from typing import Any, Final, Self

import anyio
import msgspec

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
from tracewire_bus.wire.messages import Edit, EditRecord

from .keys import Keys

__all__ = [
    "EDIT_BYTES",
    "RECORD_BYTES",
    "EditRecords",
    "EditSet",
    "Edits",
    "EditsFull",
    "Installed",
    "UnknownEdit",
    "VersionDiffers",
    "is_edit_name",
    "selected",
]

logger = logging.getLogger("tracewire")

#: How many edits a model may have, and how many bytes one may take: each request brings those that run on it.
MOST_EDITS: Final = 64
EDIT_BYTES: Final = 4 * 1024 * 1024
#: Up to how many bytes an edit cannot hold more than it may.
_SHORT: Final = 8 * 1024
#: How many bytes one entry of an edit's stream may take, and all of them together.
RECORD_BYTES: Final = 4 * 1024 * 1024
STREAM_BYTES: Final = 64 * 1024 * 1024
#: How long such a stream is kept after its last entry, in seconds.
KEEP_S: Final = 24 * 3600
_PAGE: Final = 64
_BLOCK_MS: Final = 5000

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_INSTALL: Final = Script("edit_install")
_REMOVE: Final = Script("edit_remove")
_DISABLE: Final = Script("edit_disable")
_LOAD: Final = Script("edit_load")
_TELL: Final = Script("edit_publish")


class UnknownEdit(BusError):
    """There is no edit of this name, or none of this version."""


class VersionDiffers(BusError):
    """Another version of the edit is installed than the one that was to be replaced."""

    def __init__(self, name: str, version: int) -> None:
        super().__init__(f"edit {name!r} is at version {version}" if version else f"there is no edit {name!r}")
        #: The version that is installed; 0 for none.
        self.version = version


class EditsFull(BusError):
    """The model has as many edits as it may have."""


class Installed(msgspec.Struct, frozen=True):
    """An edit that is installed.

    Attributes:
        name: its name.
        version: the generation of the model's edits that it was installed in.
        time: when, in seconds since the epoch by Redis's clock.
        edit: the edit, or None if this version cannot read it.
        problem: why it cannot be read.
        disabled: why it runs on no request any more; `""` if it does.
    """

    name: str
    version: int
    time: float
    edit: Edit | None
    problem: str = ""
    disabled: str = ""


class EditSet(msgspec.Struct, frozen=True):
    """All edits of a model at one moment, in the order in which their names were first installed."""

    generation: int
    edits: tuple[Installed, ...]


def is_edit_name(name: str) -> bool:
    """Whether an edit may have this name: 1 to 64 letters, digits, `.`, `_` or `-`, a letter or digit first."""
    return _NAME.fullmatch(name) is not None


def selected(scope: str, name: str, asked: list[str] | None) -> bool:
    """Whether an edit of this scope runs on a request that asks for these edits; None: it does not say."""
    if asked is None:
        return scope in ("all", "default")
    return scope == "all" or name in asked


def _operation() -> str:
    """An id by which a change that is sent again is made once."""
    return secrets.token_hex(8)


class Edits:
    """The edits of all models. A change is sent again if the connection breaks under it, and made once."""

    def __init__(self, connections: Connections, keys: Keys) -> None:
        self._connections = connections
        self._keys = keys

    def _all(self, model: str) -> list[str]:
        return [self._keys.edits(model, part) for part in ("state", "entries", "about", "disabled", "changes")]

    async def install(self, model: str, edit: Edit, *, replacing: int | None = None) -> int:
        """Install an edit, in place of one of its name, and return its version. `replacing` is the version of that
        one, 0 for none; without it, any.

        Raises:
            VersionDiffers: it is another.
            EditsFull: the model has too many.
            BusError: it is too large, or Redis refused it.
            BusUnavailable: Redis stayed away; it may have been installed.
        """
        data = encode(edit)
        if len(data) > EDIT_BYTES:
            raise BusError(f"the edit takes {len(data)} bytes, and may take {EDIT_BYTES}")
        before = "" if replacing is None else replacing
        command = _INSTALL(self._all(model), edit.name, data, before, request_schema_text(), MOST_EDITS, _operation())
        version, other = await self._connections.command(*command)
        if version < 0:
            raise EditsFull(f"{model!r} has {MOST_EDITS} edits: remove one first")
        if version == 0:
            raise VersionDiffers(edit.name, other)
        return int(version)

    async def remove(self, model: str, name: str, *, version: int | None = None) -> int:
        """Remove an edit, of this version if one is given. Returns the generation without it.

        Raises:
            UnknownEdit: there is none such.
            BusUnavailable: Redis stayed away; it may have been removed.
        """
        command = _REMOVE(self._all(model), name, "" if version is None else version, _operation())
        generation = int(await self._connections.command(*command))
        if not generation:
            raise UnknownEdit(f"there is no edit {name!r} on {model!r}" + (f" at version {version}" if version else ""))
        return generation

    async def disable(self, model: str, name: str, version: int, reason: str) -> bool:
        """Have an edit of this version run on no request from now on. Returns whether that is news."""
        command = _DISABLE(self._all(model), name, version, reason, _operation())
        return bool(await self._connections.command(*command))

    async def load(self, model: str) -> EditSet:
        """All edits of a model.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        generation, entries, abouts, disabled = await self._connections.command(*_LOAD(self._all(model)), alone=True)
        data, why = _by_name(entries), _by_name(disabled)
        for name, raw in data.items():
            if _SHORT < len(raw) <= EDIT_BYTES and await anyio.to_thread.run_sync(_is_too_much, raw):
                data[name] = b""
        guard, key = self._connections.guard, self._keys.edits(model, "about")
        found = [
            one
            for raw, about in _by_name(abouts).items()
            if (one := guard.read(_installed, raw, about, data.get(raw), why.get(raw, b""), key=key, entry=raw))
        ]
        number = guard.read(integer, generation, key=self._keys.edits(model, "state"), entry="generation")
        ordered = [one for _, one in sorted(found, key=lambda pair: pair[0])]
        if len(ordered) > MOST_EDITS:
            guard.note(key, "", f"it has {len(ordered)} edits, and may have {MOST_EDITS}")
        return EditSet(number or 0, tuple(ordered[:MOST_EDITS]))

    async def generation(self, model: str) -> int:
        """The number of the last change of a model's edits; 0 if there was none.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        key = self._keys.edits(model, "state")
        found = await self._connections.command("HGET", key, "generation")
        return self._connections.guard.read(integer, found or 0, key=key, entry="generation") or 0

    def changes(self, model: str) -> EditChanges:
        """Wakes who follows a model's edits. Whoever asks closes it."""
        return EditChanges(self._connections, self._keys.edits(model, "changes"))

    async def tell(self, model: str, edit: str, record: bytes) -> None:
        """Put an encoded `EditRecord` on the stream of an edit.

        Raises:
            BusError: Redis refused it.
            BusUnavailable: Redis stayed away; it may stand there.
        """
        keys = [self._keys.edit_saves(model, edit), self._keys.edit_sizes(model)]
        await self._connections.command(*_TELL(keys, edit, STREAM_BYTES, KEEP_S, schema_text(), record))

    def records(self, model: str, edit: str, since: str = "now") -> EditRecords:
        """Follow what an edit leaves, from `since` on: `"start"`, `"now"`, or the id of an entry. Whoever asks closes
        it.

        Raises:
            ValueError: `since` is nothing of that.
        """
        return EditRecords(self._connections, self._keys.edit_saves(model, edit), since)


def _is_too_much(data: bytes) -> bool:
    try:
        measure(data, "edit")
    except LimitExceeded:
        return True
    return False


def _installed(name: bytes, about: bytes, data: bytes | None, disabled: bytes) -> tuple[int, Installed]:
    """An edit, after its place among all. One that cannot be run says why, where it has a name and a version."""
    text = name.decode()
    if not is_edit_name(text):
        raise ValueError("no edit has such a name")
    place, version, time, schema = about.decode().split(" ", 3)
    edit, problem = None, ""
    try:
        check_schema(schema)
        if data is None:
            raise ValueError("it is not there")
        if len(data) > EDIT_BYTES:
            raise ValueError(f"it takes {len(data)} bytes, and may take {EDIT_BYTES}")
        edit = decode_edit(data)
        if edit.name != text:
            problem = f"its entry names {text!r}, its body {edit.name!r}"
            edit = None
    except (NewerSchema, ValueError) as error:
        problem = f"it cannot be read: {error}"
    told = disabled.decode("utf-8", "replace")
    return integer(place), Installed(text, integer(version), integer(time) / 1000, edit, problem, told)


def _by_name(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _record(flat: list[bytes]) -> EditRecord:
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    check_schema(fields.get(b"v", b"").decode("ascii", "replace"))
    return decode_edit_record(fields.get(b"d", b""))


class EditChanges:
    """Waits for changes, over a link of its own. Not for concurrent use."""

    def __init__(self, connections: Connections, key: str) -> None:
        self._link = connections.link(key)
        self._key = key
        self._position = b"0-0"

    async def wait(self, block_ms: int) -> None:
        """Wait for a change since the last call, for up to `block_ms`. It may wake for none.

        Raises:
            BusError: Redis refuses.
        """
        try:
            (reply,) = await self._link.ask(
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
        """Close its connection."""
        await self._link.drop()


class EditRecords:
    """An async iterator over the entries of an edit's stream, each with its id. It never ends by itself."""

    def __init__(self, connections: Connections, key: str, since: str) -> None:
        if since not in ("start", "now"):
            parse_id(since)
        self._link = connections.link(key)
        self._key = key
        self._parse = connections.guard.read
        #: After the last entry handed out.
        self.position = "0-0" if since == "start" else "" if since == "now" else since
        self._buffer: deque[tuple[str, EditRecord]] = deque()
        self._guard = anyio.ResourceGuard("waiting for the next record of")
        self._closed = False

    async def start(self) -> None:
        """Fix where it begins. Idempotent. While Redis is away it waits.

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
                (reply,) = await self._link.ask(command, timeout_s=_BLOCK_MS / 1000 + 30)
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
        """Close its connection. Idempotent."""
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
