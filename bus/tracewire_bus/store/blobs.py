"""Blobs: the bytes of large arrays, beside the stream whose events refer to them.

An array above a threshold does not stand in its event. The event carries an
`ArrayRef`, and the bytes lie in chunks in a hash of the trace's, where whoever wants
them fetches them and nobody else pays for them. A chunk is small enough that neither Redis nor an event loop is held up
by one, and blobs go over connections of their own, so that no event queues behind them.

All blobs of a trace are one key, which shares the trace's hash tag and its life: it is bounded from the first chunk on,
and goes with the trace's stream. A blob is complete before anything that refers to it is published: what a reader finds
missing has expired.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import anyio

from tracewire_bus.transport.backoff import Backoff
from tracewire_bus.transport.errors import BusError, BusFull, BusUnavailable
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.scripts import Script
from tracewire_bus.wire.arrays import array_from_raw, array_of, raw_bytes
from tracewire_bus.wire.digests import array_hash, content_hash
from tracewire_bus.wire.refs import ArrayRef

from .keys import Keys

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import numpy as np

__all__ = ["CHUNK_BYTES", "THRESHOLD_BYTES", "BlobMissing", "Blobs", "chunk_count", "new_blob"]

logger = logging.getLogger("tracewire")

#: Bytes of one chunk; a blob's last is shorter. One moves in well under 10 ms, in which Redis serves nobody else.
CHUNK_BYTES: Final = 1024 * 1024
#: Arrays of more bytes than this go into blobs, unless an engine was told otherwise.
THRESHOLD_BYTES: Final = 256 * 1024
#: How long the blobs of a trace are kept that no engine has accepted, in seconds from the first of them.
UNACCEPTED_S: Final = 24 * 3600
#: For how long, in seconds, and in how many bytes chunks are kept that Redis has acknowledged: as events are.
KEEP_S: float = 5.0
KEEP_BYTES: int = 64 * 1024 * 1024

_EXPIRE_ONCE: Final = Script("expire_once")
# Redis takes twice as long over a chunk that a script writes, so only the first one, which may make the key, goes that
# way: no key is left without an expiry.
_BEGIN: Final = Script("blob_begin")

_OTHER: Final = "its bytes are not those that the reference is of"


class BlobMissing(BusError, LookupError):
    """A blob is not there, or not whole, or not what its reference says."""


def new_blob() -> str:
    """A name for a blob that no other has, in whatever attempt of its trace."""
    return secrets.token_hex(8)


def chunk_count(nbytes: int) -> int:
    """How many chunks a blob of `nbytes` has."""
    return math.ceil(nbytes / CHUNK_BYTES)


class Blobs:
    """The blobs of one bus, over connections of their own, which are opened on first use.

    Any task may use it. The connections end with `aclose`.
    """

    def __init__(self, connections: Connections, keys: Keys) -> None:
        self._connections = connections
        self._keys = keys
        #: Chunks that Redis acknowledged of late, and when, once somebody has said that they may have to be repeated.
        self._kept: deque[tuple[float, str, str, int, Any]] | None = None
        self._kept_bytes = 0

    def keep(self) -> None:
        """Keep what is written from now on for some seconds, for `repeat`."""
        if self._kept is None:
            self._kept = deque()

    async def repeat(self) -> None:
        """Write again what was kept: a server that came back may lack it.

        Raises:
            BusError: Redis refused it.
            BusUnavailable: it stayed away.
        """
        for _, trace, blob, number, chunk in list(self._kept or ()):
            try:
                await self._put(trace, blob, number, chunk, refuse_full=True)
            except BusFull:
                # Whoever loads it finds it missing, should it be.
                logger.warning("a chunk of a large value of trace %s may be missing: Redis has no memory left", trace)

    async def aclose(self) -> None:
        """Close the connections that are idle; those in use are closed after it."""
        await self._connections.aclose()

    # --- writing ------------------------------------------------------------------------------------------------------

    async def put(
        self, trace: str, blob: str, number: int, chunk: Any, *, wait: bool = False, refuse_full: bool = False
    ) -> None:
        """Write chunk `number` of a blob (bytes or a buffer of them). With `wait`, for as long as Redis is away.

        Raises:
            BusFull: it has no memory left, and `refuse_full` says not to wait for it.
            BusError: Redis refused it.
            BusUnavailable: it stayed away, and nobody said to `wait`.
        """
        backoff = Backoff()
        while True:
            try:
                await self._put(trace, blob, number, chunk, refuse_full=refuse_full)
            except BusUnavailable as error:
                if not wait:
                    raise
                logger.log(backoff.level, "a blob of trace %s waits for Redis: %s", trace, error)
                await anyio.sleep(backoff.next())
            else:
                if self._kept is not None:
                    self._remember(self._kept, (anyio.current_time(), trace, blob, number, chunk))
                return

    async def _put(self, trace: str, blob: str, number: int, chunk: Any, *, refuse_full: bool) -> None:
        key, field = self._keys.blobs(trace), f"{blob}:{number}"
        commands: list[tuple[Any, ...]] = [_BEGIN((key,), UNACCEPTED_S, field, chunk)]
        if number:
            commands = [("HSET", key, field, chunk), _EXPIRE_ONCE((key,), UNACCEPTED_S)]
        # Twice is once: it is the same field.
        await self._connections.commands(*commands, refuse_full=refuse_full)

    def _remember(self, kept: deque[tuple[float, str, str, int, Any]], one: tuple[float, str, str, int, Any]) -> None:
        kept.append(one)
        self._kept_bytes += len(one[-1])
        # Not by the clock while Redis is away: nothing is written then.
        while kept and (kept[0][0] < one[0] - KEEP_S or self._kept_bytes > KEEP_BYTES):
            self._kept_bytes -= len(kept.popleft()[-1])

    async def store(self, trace: str, array: Any, name: str = "") -> ArrayRef:
        """Write an array that an engine is to use, chunk by chunk, and return the reference to it.

        Engines share such an array between traces by its digest, which is therefore that of `content_hash`.

        Raises:
            Unsavable: `array` cannot travel.
            BusFull: Redis has no memory left.
            BusError: Redis refused it.
            BusUnavailable: it stayed away.
        """
        plain = array_of(array)
        state = content_hash(plain.dtype.name, plain.shape)
        raw, blob = raw_bytes(plain), new_blob()
        for number in range(chunk_count(len(raw))):
            chunk = raw[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            state.update(chunk)
            await self.put(trace, blob, number, chunk, refuse_full=True)
        return ArrayRef(plain.dtype.name, plain.shape, state.digest(), blob, name)

    # --- reading ------------------------------------------------------------------------------------------------------

    async def chunks(self, trace: str, ref: ArrayRef) -> AsyncIterator[bytes]:
        """The chunks of a blob that `store` wrote, in order, checked against the reference with the last.

        Raises:
            BlobMissing: one is not there, or they are not what the reference says.
            BusUnavailable: Redis stayed away.
        """
        state = content_hash(ref.dtype, ref.shape)
        async for chunk in self._chunks(trace, ref):
            state.update(chunk)
            yield chunk
        if state.digest() != ref.digest:
            raise BlobMissing(_OTHER)

    async def _chunks(self, trace: str, ref: ArrayRef) -> AsyncIterator[bytes]:
        left = ref.nbytes
        for number in range(chunk_count(left)):
            chunk = await self._connections.command("HGET", self._keys.blobs(trace), f"{ref.blob}:{number}")
            if chunk is None:
                raise BlobMissing(f"chunk {number} of {chunk_count(ref.nbytes)} is not there: it has expired")
            left -= len(chunk)
            if len(chunk) > CHUNK_BYTES or left < 0:
                break
            yield chunk
        if left:
            raise BlobMissing(_OTHER)

    async def load(self, trace: str, ref: ArrayRef) -> np.ndarray[Any, Any]:
        """The array that a reference stands for, read-only.

        Raises:
            BlobMissing: it is not there, not whole, or not what the reference says.
            BusUnavailable: Redis stayed away.
        """
        # Grown as it comes: what a reference says of its size is only a claim.
        raw = bytearray()
        async for chunk in self._chunks(trace, ref):
            raw += chunk
        if not any(_digest_of(raw, take(ref.dtype, ref.shape)) == ref.digest for take in (array_hash, content_hash)):
            raise BlobMissing(_OTHER)
        return array_from_raw(ref.dtype, ref.shape, raw)


def _digest_of(raw: bytearray, state: Any) -> bytes:
    state.update(raw)
    digest: bytes = state.digest()
    return digest
