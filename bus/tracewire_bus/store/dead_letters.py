"""The dead-letter queue: queue entries that no engine could answer, or that were given up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.scripts import Script

from .keys import Keys
from .queue_entries import REMEMBER_S, Taken, to_bytes, to_text

__all__ = ["DeadLetter", "DeadLetters"]

#: About how many dead letters Redis keeps; older ones are trimmed.
_MOST: Final = 10_000

_ADD: Final = Script("dead_letter_add")


class DeadLetter(msgspec.Struct, frozen=True):
    """A queue entry that no engine could answer, or that was given up after `max_attempts` lost engines.

    Attributes:
        id: the dead letter's id.
        time: when it became a dead letter, in seconds since the epoch by Redis's clock.
        model: the model of the queue.
        trace: the trace's id. Bytes that are not UTF-8 are surrogates.
        reason: why it is a dead letter.
        schema, data: schema and encoded submission as the client queued them. Either may be malformed.
    """

    id: str
    time: float
    model: str
    trace: str
    reason: str
    schema: str
    data: bytes


def _dead_letter(id_: bytes, flat: Sequence[bytes]) -> DeadLetter:
    fields = dict(zip(flat[::2], flat[1::2], strict=True))

    def shown(name: bytes) -> str:
        return fields.get(name, b"").decode("utf-8", "replace")

    milliseconds = int(id_.partition(b"-")[0])
    return DeadLetter(
        id=id_.decode(),
        time=milliseconds / 1000,
        model=shown(b"model"),
        trace=to_text(fields.get(b"entry", b"")),
        reason=shown(b"reason"),
        schema=shown(b"v"),
        data=fields.get(b"d", b""),
    )


class DeadLetters:
    """The dead-letter queue of a bus, which all models share."""

    def __init__(self, connections: Connections, keys: Keys) -> None:
        self._connections = connections
        self._keys = keys

    async def add(self, model: str, taken: Taken, reason: str, data: bytes | None = None) -> None:
        """Add an entry of a model's queue as a dead letter. `data` is its encoded submission if `taken` lacks that.

        The call may be repeated: an entry becomes one dead letter.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        fields = [part for field in taken.fields.items() for part in field]
        if data is not None:
            fields += [b"d", data]
        call = _ADD(
            (self._keys.dead(), to_bytes(self._keys.dead_mark(model, taken.trace))),
            *(REMEMBER_S, _MOST),
            *("model", model, "entry", to_bytes(taken.trace), "reason", reason[:1000], *fields),
        )
        await self._connections.command(*call)

    async def list(self, after: str = "", count: int = 100) -> list[DeadLetter]:
        """Up to `count` dead letters after the id `after`, oldest first. `""` begins with the oldest.

        Raises:
            BusError: `after` is not an id.
            BusUnavailable: Redis does not answer.
        """
        start = f"({after}" if after else "-"
        found = await self._connections.command("XRANGE", self._keys.dead(), start, "+", "COUNT", count, unbatched=True)
        return [_dead_letter(*one) for one in found]

    async def count(self) -> int:
        """The number of dead letters.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        return int(await self._connections.command("XLEN", self._keys.dead()))

    async def find(self, id_: str) -> DeadLetter | None:
        """The dead letter of this id; None if there is none.

        Raises:
            BusError: `id_` is not an id.
            BusUnavailable: Redis does not answer.
        """
        found = await self._connections.command("XRANGE", self._keys.dead(), id_, id_, unbatched=True)
        return _dead_letter(*found[0]) if found else None

    async def drop(self, id_: str) -> bool:
        """Remove a dead letter. Returns whether it was there.

        Raises:
            BusError: `id_` is not an id.
            BusUnavailable: Redis does not answer; the dead letter may have been removed.
        """
        # If the reply of XDEL is lost, the link sends XDEL again, which then removes nothing: its reply cannot be used.
        there = await self._connections.command("XRANGE", self._keys.dead(), id_, id_)
        await self._connections.command("XDEL", self._keys.dead(), id_)
        return bool(there)
