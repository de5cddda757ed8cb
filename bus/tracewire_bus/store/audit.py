"""The audit trail: who asked engines for what, and whether they did it, in one bounded stream; and the code that ran.

Engines append to the stream and change no entry of it; so do guards that may. The source of each block that an engine
has accepted or refused lies beside it, under the hash of its code.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, Literal, Protocol

import anyio
import msgspec

from tracewire_bus.transport.backoff import Backoff
from tracewire_bus.transport.errors import BusUnavailable

from .keys import Keys

__all__ = ["MOST", "AuditEntry", "AuditLog", "Commands"]

#: How long the source of a block is kept, in seconds. Engines write it again while it is in use.
CODE_S: Final = 90 * 24 * 3600
#: The same for a block that an engine has refused.
REFUSED_CODE_S: Final = 7 * 24 * 3600
#: The longest source that is kept, in characters.
CODE_CHARACTERS: Final = 256 * 1024
#: How many entries the trail keeps unless an operator says otherwise.
MOST: Final = 100_000
_PAGE: Final = 512
#: How often a reader that follows looks for new entries, in seconds.
_LOOK_S: Final = 0.5


class AuditEntry(msgspec.Struct):
    """One decision of an engine, or of a guard.

    Attributes:
        id: the entry's id in the stream; `""` before it is appended. Its first part is the time in milliseconds.
        time: of the decision, in seconds since the epoch by the engine's clock.
        engine, model: which engine decided, and its model.
        kind: `submit`, `steer`, `pause`, `resume`, `cancel`, `drain` or `edit`; `guard` for a guard's, whose `reason`
            has the rule, the token and what was done.
        name: the trace's id; for an edit its name, for draining the engine.
        decision: `accepted` or `refused`.
        key, tenant: of the signature; `""` without one that is valid.
        reason: why it was refused.
        code: the hashes of the code that came with it.
        by: the name that the client gives itself.
    """

    kind: str
    name: str
    decision: Literal["accepted", "refused"]
    time: float = 0.0
    engine: str = ""
    model: str = ""
    key: str = ""
    tenant: str = ""
    reason: str = ""
    code: list[str] = []
    by: str = ""
    id: str = ""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AuditEntry)


class Commands(Protocol):
    """What the trail needs of a bus."""

    @property
    def keys(self) -> Keys:
        """The names of its keys."""

    async def command(self, *command: Any) -> Any:
        """Execute a command of Redis."""

    async def commands(self, *commands: tuple[Any, ...], within_s: float = 0.0) -> list[Any]:
        """Execute several in one round trip, which may wait for up to `within_s` seconds for others to share it."""


class AuditLog:
    """The audit trail of one bus."""

    def __init__(self, bus: Commands) -> None:
        self._bus = bus

    async def append(self, entries: Sequence[AuditEntry], most: int, within_s: float = 0.0) -> None:
        """Append entries, within so many seconds. The stream keeps about `most` of them.

        Raises:
            BusError: Redis refuses, or does not answer.
        """
        await self._bus.commands(*self.append_commands(entries, most), within_s=within_s)

    def append_commands(self, entries: Sequence[AuditEntry], most: int) -> list[tuple[Any, ...]]:
        """The commands that append these entries, one for each. The stream keeps about `most` entries."""
        key = self._bus.keys.audit
        return [("XADD", key, "MAXLEN", "~", most, "*", "e", _encoder.encode(entry)) for entry in entries]

    async def keep_code(self, hash: str, text: str, *, refused: bool = False) -> None:
        """Keep the source of a block under the hash of its code. A refusal does not change for how long it is kept.

        Raises:
            BusError: Redis refuses, or does not answer.
        """
        key, data = self._bus.keys.audit_code(hash), text[:CODE_CHARACTERS].encode()
        how = ("EX", REFUSED_CODE_S, "NX") if refused else ("EX", CODE_S)
        await self._bus.command("SET", key, data, *how)

    async def code(self, hash: str) -> str | None:
        """The source of the code of this hash; None if it is not kept.

        Raises:
            BusError: Redis refuses, or does not answer.
        """
        found = await self._bus.command("GET", self._bus.keys.audit_code(hash))
        return None if found is None else bytes(found).decode("utf-8", "replace")

    async def read(self, *, follow: bool = False) -> AsyncIterator[AuditEntry]:
        """The entries, oldest first, and with `follow` new ones for ever. An entry that is malformed is left out.

        Raises:
            BusError: Redis refuses, or does not answer.
        """
        position, backoff = "-", Backoff()
        while True:
            try:
                page = await self._bus.command("XRANGE", self._bus.keys.audit, position, "+", "COUNT", _PAGE)
                backoff.reset()
            except BusUnavailable:
                if not follow:
                    raise
                await anyio.sleep(backoff.next())
                continue
            for id, fields in page:
                position = f"({id.decode()}"
                entry = _entry(id.decode(), fields)
                if entry is not None:
                    yield entry
            if len(page) < _PAGE:
                if not follow:
                    return
                await anyio.sleep(_LOOK_S)


def _entry(id: str, flat: Sequence[bytes]) -> AuditEntry | None:
    try:
        entry = _decoder.decode(dict(zip(flat[::2], flat[1::2], strict=True))[b"e"])
    except (ValueError, KeyError):
        return None
    entry.id = id
    return entry
