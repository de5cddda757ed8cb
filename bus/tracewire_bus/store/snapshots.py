"""Snapshots: the folded state of a trace at one of its events, beside a stream that is trimmed up to that event.

The engine that runs a long trace bounds the trace's stream: it reads the last snapshot and the entries since, folds
them, writes the state beside the stream, and trims the stream. The snapshot's own event stays on the stream, so that a
reader can tell the stream's next event from a gap. A reader of a trimmed stream goes on from the snapshot, with the
same state as a reader that has read all events.

A snapshot is a hash. The engine first writes the data in chunks under a new name. One script then makes these chunks
the snapshot, removes the chunks of the previous one, and trims the stream. After a crash in between, the stream is
unchanged and the next snapshot removes the chunks. The script refuses a snapshot that is not newer than the present
one, and one of an engine whose trace another engine has taken.

A restarted trace starts over, so a fold drops the state of an earlier attempt at the first event of the next one.
"""

from __future__ import annotations

import secrets
from typing import Any, Final

import msgspec
from anyio.lowlevel import checkpoint

from tracewire_bus.bulk.reader import BulkReader
from tracewire_bus.domain.fold import Fold, FoldError
from tracewire_bus.transport.guard import integer
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.scripts import Script
from tracewire_bus.wire.codec import (
    UnknownKind,
    check_schema,
    decode_plain,
    decode_snapshot,
    encode,
    find_bulk,
    schema_text,
    with_deltas,
)
from tracewire_bus.wire.ids import FINAL_ID
from tracewire_bus.wire.messages import Event

from .keys import Keys

__all__ = ["CHUNK_BYTES", "Snapshots", "Stored", "Trimmed"]

#: Size of a chunk in bytes; the last is shorter. Redis serves no other client while it moves one, well under 10 ms.
CHUNK_BYTES: Final = 1024 * 1024
#: Number of entries that one read returns at most.
_PAGE: Final = 128
#: How long Redis keeps the snapshot of a trace that has not ended, in seconds: as long as the trace itself.
_UNFINISHED_S: Final = 7 * 24 * 3600
#: How often `read` starts over because a newer snapshot has replaced the one that it was reading.
_TRIES: Final = 10

_EXPIRE_ONCE: Final = Script("expire_once")
_COMMIT: Final = Script("snapshot_commit")


class Stored(msgspec.Struct, frozen=True, gc=False):
    """A snapshot as Redis keeps it.

    Attributes:
        attempt, seq: the last event that is folded into it.
        schema: the schema of `data`.
        data: the encoded state, for `decode_snapshot`.
    """

    attempt: int
    seq: int
    schema: str
    data: bytes

    @property
    def id(self) -> str:
        """Id of the last event that is folded into it: `<attempt>-<seq>`."""
        return f"{self.attempt}-{self.seq}"


class Trimmed(msgspec.Struct, frozen=True):
    """The outcome of `Snapshots.take`.

    Attributes:
        id: the last event in the snapshot.
        entries: number of events of this attempt that `take` folded.
        nbytes: size of these events, encoded, in bytes.
        state: size of the snapshot in bytes.
    """

    id: str
    entries: int
    nbytes: int
    state: int


class Snapshots:
    """The snapshots of one bus, over connections of their own, which open on first use. Any task may use it."""

    def __init__(self, connections: Connections, keys: Keys, bulk: BulkReader) -> None:
        self._connections = connections
        self._keys = keys
        self._bulk = bulk

    async def aclose(self) -> None:
        """Close idle connections now, and the others at the end of their commands."""
        await self._connections.aclose()

    async def read(self, trace: str) -> Stored | None:
        """The snapshot of a trace; None if there is none, or if it is malformed or incomplete.

        Raises:
            BusUnavailable: Redis does not answer.
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
                    # A newer snapshot has replaced it meanwhile.
                    break
            else:
                return Stored(*where[:3], b"".join(chunks))
        return None

    async def take(self, trace: str, attempt: int) -> Trimmed | None:
        """Fold a trace's stream up to its present end, write the snapshot, and trim the stream.

        The engine that runs `attempt` calls this, one call at a time for a trace. After any error it may call again.

        Returns None if nothing was trimmed: the stream has only the first event of this attempt, or a final, or events
        of another attempt, or Redis refused the snapshot.

        Raises:
            FoldError: the stream does not go on from its last snapshot, since another process trimmed the stream.
            ValueError: this version cannot read the stream or the snapshot.
            BulkMissing: the saves of an output in a bulk store are gone.
            BusError: Redis refuses.
            BusUnavailable: Redis does not answer.
        """
        fold, events = Fold(), self._keys.events(trace)
        stored = await self.read(trace)
        if stored is not None:
            check_schema(stored.schema)
            # Each long computation gets a turn of the event loop of its own.
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
                if (where := find_bulk(data)) is not None:
                    data = with_deltas(data, await self._bulk.read(where))
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
    """Fold an entry. An entry of an unknown kind, of a later version, only counts."""
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
