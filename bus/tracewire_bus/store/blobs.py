"""Blobs: the bytes of large arrays, beside the stream whose events refer to them.

The event of an array above a threshold carries an `ArrayRef` instead of the bytes. The bytes lie in chunks in a hash,
and only consumers that load the array fetch them. Chunks are small, so that a chunk delays neither Redis nor an event
loop for long. Blobs go over connections of their own, so that no event waits behind them.

One hash holds all blobs of a trace. It shares the trace's hash tag, has an expiry from the first chunk on, and expires
with the trace's stream. The engine completes a blob before it publishes a reference, so a blob that a reader does not
find has expired.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import anyio

from tracewire_bus.transport.backoff import Backoff, outages
from tracewire_bus.transport.errors import BusError, BusFull, BusUnavailable
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.scripts import Script
from tracewire_bus.wire.arrays import array_from_raw, array_of, raw_bytes
from tracewire_bus.wire.digests import array_hash, content_hash
from tracewire_bus.wire.pieces import Pieces
from tracewire_bus.wire.refs import ArrayRef

from .keys import Keys

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import numpy as np

__all__ = ["CHUNK_BYTES", "THRESHOLD_BYTES", "BlobMissing", "Blobs", "chunk_count", "new_blob"]

logger = logging.getLogger("tracewire")

#: Size of a chunk in bytes; the last is shorter. Redis serves no other client while it moves one, well under 10 ms.
CHUNK_BYTES: Final = 1024 * 1024
#: Arrays of more bytes than this go into blobs, unless an option of the engine says another number.
THRESHOLD_BYTES: Final = 256 * 1024
#: How long Redis keeps the blobs of a trace that no engine has accepted, in seconds from the first chunk.
UNACCEPTED_S: Final = 24 * 3600
#: How many chunks one command removes.
_REMOVED_AT_ONCE: Final = 64
#: For how many seconds, and up to how many bytes, `Blobs` keeps acknowledged chunks to write them again.
KEEP_S: float = 5.0
KEEP_BYTES: int = 64 * 1024 * 1024

_EXPIRE_ONCE: Final = Script("expire_once")
# Redis takes twice as long for a chunk that a script writes. So only the first chunk goes through the script, which
# creates the key together with its expiry.
_BEGIN: Final = Script("blob_begin")

_MISMATCH: Final = "its bytes do not match the reference"


class BlobMissing(BusError, LookupError):
    """A blob is missing or incomplete, or its bytes do not match its reference."""


def new_blob() -> str:
    """A random name for a blob, unique over all attempts of its trace."""
    return secrets.token_hex(8)


def chunk_count(nbytes: int) -> int:
    """The number of chunks of a blob of `nbytes` bytes."""
    return math.ceil(nbytes / CHUNK_BYTES)


class Blobs:
    """The blobs of one bus, over connections of their own, which open on first use. Any task may use it."""

    def __init__(self, connections: Connections, keys: Keys) -> None:
        self._connections = connections
        self._keys = keys
        #: Recently acknowledged chunks: time, trace, blob, number and bytes. None until `keep` is called.
        self._kept: deque[tuple[float, str, str, int, Any]] | None = None
        self._kept_bytes = 0

    def keep(self) -> None:
        """Keep each chunk written from now on for some seconds after its acknowledgement, for `repeat`."""
        if self._kept is None:
            self._kept = deque()

    async def repeat(self) -> None:
        """Write the kept chunks again, for a server that restarted and may have lost them.

        Raises:
            BusError: Redis refuses.
            BusUnavailable: Redis does not answer.
        """
        for _, trace, blob, number, chunk in list(self._kept or ()):
            try:
                await self._put(trace, blob, number, chunk, refuse_full=True)
            except BusFull:
                # If the chunk is missing, loading the blob raises `BlobMissing`.
                logger.warning("a chunk of a large value of trace %s may be missing: Redis has no memory left", trace)

    async def aclose(self) -> None:
        """Close idle connections now, and the others at the end of their commands."""
        await self._connections.aclose()

    # --- writing ------------------------------------------------------------------------------------------------------

    async def put(
        self, trace: str, blob: str, number: int, chunk: Any, *, wait: bool = False, refuse_full: bool = False
    ) -> None:
        """Write chunk `number` of a blob: bytes, or a buffer of bytes.

        With `wait`, the call waits without limit while Redis does not answer.

        Raises:
            BusFull: Redis has no memory left, and `refuse_full` is true; otherwise the call waits for memory.
            BusError: Redis refuses.
            BusUnavailable: Redis does not answer, and `wait` is false.
        """
        backoff = Backoff()
        while True:
            try:
                await self._put(trace, blob, number, chunk, refuse_full=refuse_full)
            except BusUnavailable as error:
                if not wait:
                    raise
                outages.log(backoff.level, "a blob of trace %s waits for Redis: %s", trace, error)
                await anyio.sleep(backoff.next())
            else:
                if self._kept is not None:
                    self._remember(self._kept, (anyio.current_time(), trace, blob, number, chunk))
                return

    async def _put(self, trace: str, blob: str, number: int, chunk: Any, *, refuse_full: bool) -> None:
        key, field = self._keys.blobs(trace), f"{blob}:{number}"
        data = Pieces([chunk])
        commands: list[tuple[Any, ...]] = [_BEGIN((key,), UNACCEPTED_S, field, data)]
        if number:
            commands = [("HSET", key, field, data), _EXPIRE_ONCE((key,), UNACCEPTED_S)]
        # Idempotent: a repeat writes the same field.
        await self._connections.commands(*commands, refuse_full=refuse_full)

    def _remember(self, kept: deque[tuple[float, str, str, int, Any]], one: tuple[float, str, str, int, Any]) -> None:
        kept.append(one)
        self._kept_bytes += len(one[-1])
        # Runs only when a chunk is acknowledged, so chunks are not dropped while Redis does not answer.
        while kept and (kept[0][0] < one[0] - KEEP_S or self._kept_bytes > KEEP_BYTES):
            self._kept_bytes -= len(kept.popleft()[-1])

    async def store(self, trace: str, array: Any, name: str = "") -> ArrayRef:
        """Write an array for an engine, chunk by chunk. Returns the reference to it, with `name` as the array's name.

        Engines share such an array between traces by its digest, which is therefore that of `content_hash`.

        Raises:
            Unsavable: `array` has no form on the wire.
            BusFull: Redis has no memory left.
            BusError: Redis refuses.
            BusUnavailable: Redis does not answer.
        """
        plain = array_of(array)
        state = content_hash(plain.dtype.name, plain.shape)
        raw, blob = raw_bytes(plain), new_blob()
        for number in range(chunk_count(len(raw))):
            chunk = raw[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            state.update(chunk)
            try:
                await self.put(trace, blob, number, chunk, refuse_full=True)
            except BusFull:
                await self._remove(trace, [f"{blob}:{written}" for written in range(number)])
                raise
        return ArrayRef(plain.dtype.name, plain.shape, state.digest(), blob, name)

    async def remove(self, trace: str, refs: Sequence[ArrayRef]) -> None:
        """Remove arrays that `store` wrote and that nobody reads. If Redis does not do it, they expire."""
        await self._remove(trace, [f"{ref.blob}:{number}" for ref in refs for number in range(chunk_count(ref.nbytes))])

    async def _remove(self, trace: str, fields: Sequence[str]) -> None:
        try:
            for start in range(0, len(fields), _REMOVED_AT_ONCE):
                some = fields[start : start + _REMOVED_AT_ONCE]
                await self._connections.command("HDEL", self._keys.blobs(trace), *some)
        except BusError as error:
            logger.debug("the arrays of trace %s, which was refused, stay until they expire: %s", trace, error)

    # --- reading ------------------------------------------------------------------------------------------------------

    async def chunks(self, trace: str, ref: ArrayRef) -> AsyncIterator[bytes]:
        """The chunks of a blob that `store` wrote, in order. After the last one, the digest is compared.

        Raises:
            BlobMissing: a chunk is missing, or the bytes do not match the reference.
            BusUnavailable: Redis does not answer.
        """
        state = content_hash(ref.dtype, ref.shape)
        async for chunk in self._chunks(trace, ref):
            state.update(chunk)
            yield chunk
        if state.digest() != ref.digest:
            raise BlobMissing(_MISMATCH)

    async def _chunks(self, trace: str, ref: ArrayRef) -> AsyncIterator[bytes]:
        left = ref.nbytes
        for number in range(chunk_count(left)):
            chunk = await self._connections.command("HGET", self._keys.blobs(trace), f"{ref.blob}:{number}")
            if chunk is None:
                raise BlobMissing(f"chunk {number} of {chunk_count(ref.nbytes)} is missing: it has expired")
            left -= len(chunk)
            if len(chunk) > CHUNK_BYTES or left < 0:
                break
            yield chunk
        if left:
            raise BlobMissing(_MISMATCH)

    async def load(self, trace: str, ref: ArrayRef) -> np.ndarray[Any, Any]:
        """Load the array of a reference. The array is read-only.

        Raises:
            BlobMissing: a chunk is missing, or the bytes do not match the reference.
            BusUnavailable: Redis does not answer.
        """
        # Not allocated ahead: the size in the reference comes from the wire and may be wrong.
        raw = bytearray()
        async for chunk in self._chunks(trace, ref):
            raw += chunk
        if not any(_digest_of(raw, take(ref.dtype, ref.shape)) == ref.digest for take in (array_hash, content_hash)):
            raise BlobMissing(_MISMATCH)
        return array_from_raw(ref.dtype, ref.shape, raw)


def _digest_of(raw: bytearray, state: Any) -> bytes:
    state.update(raw)
    digest: bytes = state.digest()
    return digest
