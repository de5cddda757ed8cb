"""Snapshots: the folded state of a trace at one of its events, beside a stream that was trimmed up to that event.

A stream that may not grow for ever is folded up to its present end, by reading back the last snapshot and the entries
since. The state is written beside the stream, and the stream is trimmed to what comes after: the snapshot's own event
stays, so that no stream is ever trimmed to nothing and its next event can be told from a gap. Whoever finds that events
are gone holds the same after the snapshot as if it had read them.

A snapshot is a hash of the trace's. Its data lies in chunks, written first, under a name of their own; one script then
makes them the snapshot, removes those of the one before, and trims. A crash between leaves chunks that the next
snapshot removes, and a stream as it was. The script refuses a snapshot that is not newer than the one there, and one of
an engine whose trace another has taken.

A restarted trace starts over: what a snapshot of an earlier attempt holds is of no use from the first event of the next
one on, which a fold finds by itself.
"""

from __future__ import annotations

import secrets
from typing import Any, Final

import msgspec
from anyio.lowlevel import checkpoint

from tracewire_bus.domain.fold import Fold, FoldError
from tracewire_bus.transport.guard import integer
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.scripts import Script
from tracewire_bus.wire.codec import UnknownKind, check_schema, decode_plain, decode_snapshot, encode, schema_text
from tracewire_bus.wire.ids import FINAL_ID
from tracewire_bus.wire.messages import Event

from .keys import Keys

__all__ = ["CHUNK_BYTES", "Snapshots", "Stored", "Trimmed"]

#: Bytes of one chunk; the last is shorter. One moves in well under 10 ms, in which Redis serves nobody else.
CHUNK_BYTES: Final = 1024 * 1024
#: How many entries are read at once.
_PAGE: Final = 128
#: How long a snapshot is kept whose trace has no end, in seconds: as long as the trace.
_UNFINISHED_S: Final = 7 * 24 * 3600
#: How often a snapshot is read again that was replaced meanwhile.
_TRIES: Final = 10

_EXPIRE_ONCE: Final = Script("expire_once")
_COMMIT: Final = Script("snapshot_commit")


class Stored(msgspec.Struct, frozen=True, gc=False):
    """A snapshot as it is kept: the event that it follows, and what `decode_snapshot` takes, in this schema."""

    attempt: int
    seq: int
    schema: str
    data: bytes

    @property
    def id(self) -> str:
        """Id of the last event that is folded in it."""
        return f"{self.attempt}-{self.seq}"


class Trimmed(msgspec.Struct, frozen=True):
    """What became of a stream: of this attempt's events `entries`, of `nbytes` encoded, are now in the snapshot.

    `state` is the snapshot's size in bytes.
    """

    id: str
    entries: int
    nbytes: int
    state: int


class Snapshots:
    """The snapshots of one bus, over connections of their own, which are opened on first use. Any task may use it."""

    def __init__(self, connections: Connections, keys: Keys) -> None:
        self._connections = connections
        self._keys = keys

    async def aclose(self) -> None:
        """Close the connections that are idle; those in use are closed after it."""
        await self._connections.aclose()

    async def read(self, trace: str) -> Stored | None:
        """The snapshot of a trace; None if there is none, or it is not whole.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        key = self._keys.snapshot(trace)
        for _ in range(_TRIES):
            attempt, seq, schema, count, name = await self._connections.command("HMGET", key, *"asvng")
            if name is None:
                return None
            where = self._connections.guard.read(_place, attempt, seq, schema, count, key=key)
            if where is None:
                return None
            chunks = []
            for number in range(where[3]):
                chunks.append(await self._connections.command("HGET", key, b"%s:%d" % (name, number)))
                if chunks[-1] is None:
                    # Replaced by a newer one meanwhile.
                    break
            else:
                return Stored(*where[:3], b"".join(chunks))
        return None

    async def take(self, trace: str, attempt: int) -> Trimmed | None:
        """Fold a trace's stream up to its present end, as the engine that runs this attempt, and trim it to that.

        None where there is nothing to trim: no events of this attempt but its first, an end, or another attempt. May
        be repeated after any error. One at a time for a trace.

        Raises:
            FoldError: the stream does not go on from its last snapshot: somebody else trimmed it.
            ValueError: the stream or the snapshot holds what this version cannot read.
            BusError: Redis refused it.
            BusUnavailable: Redis stayed away.
        """
        fold, events = Fold(), self._keys.events(trace)
        stored = await self.read(trace)
        if stored is not None:
            check_schema(stored.schema)
            # Whatever takes long has its own turn: others share the loop.
            await checkpoint()
            fold.resume(decode_snapshot(stored.data, plain=True))
            await checkpoint()
        entries = nbytes = 0
        while True:
            after = f"({fold.attempt}-{fold.seq}" if fold.attempt else "-"
            page = await self._connections.command("XRANGE", events, after, "+", "COUNT", _PAGE)
            for id_, flat in page:
                if id_.decode() == FINAL_ID:
                    return None
                fields = dict(zip(flat[::2], flat[1::2], strict=True))
                data = fields.get(b"d", b"")
                _apply(fold, id_.decode(), data)
                if fold.attempt == attempt:
                    entries, nbytes = entries + 1, nbytes + len(data)
            if len(page) < _PAGE:
                break
        if fold.attempt != attempt or fold.seq < 1 or not entries:
            return None
        state = encode(fold.snapshot())
        await checkpoint()
        id_ = f"{fold.attempt}-{fold.seq}"
        answer = await self._write(trace, fold.attempt, fold.seq, state)
        return Trimmed(id_, entries, nbytes, len(state)) if answer == b"trimmed" else None

    async def _write(self, trace: str, attempt: int, seq: int, state: bytes) -> bytes:
        keys, name = self._keys, secrets.token_hex(8)
        key = keys.snapshot(trace)
        chunks = [state[start : start + CHUNK_BYTES] for start in range(0, len(state), CHUNK_BYTES)]
        for number, chunk in enumerate(chunks):
            await self._connections.commands(
                ("HSET", key, f"{name}:{number}", chunk), _EXPIRE_ONCE((key,), _UNFINISHED_S)
            )
        answer: bytes = await self._connections.command(
            *_COMMIT((key, keys.events(trace), keys.record(trace)), *(attempt, seq, schema_text(), len(chunks), name))
        )
        return answer


def _place(attempt: bytes, seq: bytes, schema: bytes, count: bytes) -> tuple[int, int, str, int]:
    return integer(attempt), integer(seq), schema.decode("ascii", "replace"), integer(count)


def _apply(fold: Fold, id_: str, data: bytes) -> None:
    """Fold an entry, or count it if it is of a kind that this version does not know."""
    try:
        event: Any = decode_plain(data)
    except UnknownKind:
        attempt, _, seq = id_.partition("-")
        if (int(attempt), int(seq)) != (fold.attempt, fold.seq + 1):
            raise FoldError(f"event {id_} does not follow {fold.attempt}-{fold.seq}") from None
        fold.seq += 1
        return
    assert isinstance(event, Event)
    fold.apply(event)
