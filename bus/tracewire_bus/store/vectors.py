"""Vectors: arrays of declared interventions, which clients store once and traces refer to by digest.

Services send the same vectors with trace after trace. A client stores an array of `VECTOR_BYTES` or more under a name
made from a BLAKE2b digest of its dtype, shape and elements. A trace has a reference in its place (`ArrayRef`). An
engine fetches a vector that it does not have yet, and compares it with its name. So nobody can pass off one vector as
another, and tenants of an engine can share them.

A vector is one hash with a field for each chunk. It expires a day after it was last stored or fetched. A client stores
a vector again after an hour, and after Redis was away, since Redis may have lost it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import anyio
import xxhash

from tracewire_bus.transport.errors import BusError
from tracewire_bus.wire.arrays import array_from_raw, payload_parts
from tracewire_bus.wire.digests import content_hash
from tracewire_bus.wire.pieces import Pieces
from tracewire_bus.wire.refs import VECTOR, ArrayRef

from .blobs import CHUNK_BYTES, chunk_count
from .keys import Keys

if TYPE_CHECKING:
    import numpy as np

    from tracewire_bus.transport.pool import Connections

__all__ = ["MISSING", "VECTOR_BYTES", "VectorMissing", "Vectors", "reference_to"]

#: Arrays of interventions with at least this many bytes are stored as vectors.
VECTOR_BYTES: Final = 4096
#: How long Redis keeps a vector from when it was last stored or fetched, in seconds.
KEPT_S: Final = 24 * 3600
#: How long a client relies on a vector that it has stored, in seconds.
KNOWN_S: Final = 3600
#: Bytes of arrays whose digests a client remembers.
REMEMBERED_BYTES: int = 32 * 1024 * 1024

#: The type of the failure with which an engine rejects a trace whose vector it cannot fetch.
MISSING: Final = "VectorMissing"


class VectorMissing(BusError, LookupError):
    """A vector is missing or incomplete, or its content does not match its reference."""


def reference_to(payload: bytes) -> ArrayRef:
    """The reference to an array, from its encoded form (the data of its msgpack extension)."""
    dtype, shape, raw = payload_parts(payload)
    state = content_hash(dtype, shape)
    state.update(raw)
    return ArrayRef(dtype, shape, state.digest(), VECTOR + state.hexdigest())


class Vectors:
    """The vectors of one bus, over connections of their own, which open on first use. Any task may use it."""

    def __init__(self, connections: Connections, keys: Keys) -> None:
        self._shared = connections
        self._connections = connections.unbatched()
        self._keys = keys
        #: Encoded arrays with their references, by XXH3, the least recently used first; and the XXH3 of each of these
        #: arrays by the `id` of its bytes, for a caller that brings the very same object again.
        self._references: OrderedDict[bytes, tuple[bytes, ArrayRef]] = OrderedDict()
        self._keys_by_id: dict[int, bytes] = {}
        self._bytes = 0
        #: When this bus stored each vector, by the event loop's clock.
        self._stored: dict[ArrayRef, float] = {}
        self._forgotten_at = -math.inf
        #: The vectors that some task stores now, each with what is set when the task is done.
        self._storing: dict[ArrayRef, anyio.Event] = {}

    async def aclose(self) -> None:
        """Close idle connections now, and the others at the end of their commands."""
        await self._connections.aclose()

    # --- writing ------------------------------------------------------------------------------------------------------

    def known(self, payload: bytes) -> ArrayRef | None:
        """The reference to an encoded array that `store` has had lately; `None` for another array.

        Takes less time than computing the digest by which a reference names its array.
        """
        key = self._key(payload)
        found = self._references.get(key)
        # Compared as a whole: anybody can make two arrays with the same XXH3.
        if found is None or found[0] != payload:
            return None
        self._references.move_to_end(key)
        return found[1]

    async def store(self, payloads: Mapping[ArrayRef, bytes]) -> None:
        """Have Redis keep vectors, given encoded with their references. Writes only those not stored lately.

        Raises:
            BusFull: Redis has no memory left.
            BusError: Redis refuses.
            BusUnavailable: Redis does not answer.
        """
        for ref, payload in payloads.items():
            self._remember(ref, payload)
        while missing := self._not_stored(payloads):
            mine = [ref for ref in missing if ref not in self._storing]
            if not mine:
                await self._storing[missing[0]].wait()
                continue
            done = anyio.Event()
            self._storing |= dict.fromkeys(mine, done)
            try:
                await self._write({ref: payloads[ref] for ref in mine})
            finally:
                for ref in mine:
                    del self._storing[ref]
                done.set()

    def forget(self) -> None:
        """Store all vectors again when they are next used: an engine has found one missing."""
        self._stored.clear()
        self._forgotten_at = anyio.current_time()

    def stored_at(self, refs: Iterable[ArrayRef]) -> float:
        """When this bus stored the first of these vectors, by the event loop's clock."""
        return min((self._stored.get(ref, -math.inf) for ref in refs), default=-math.inf)

    @property
    def kept_since(self) -> float:
        """The time by the event loop's clock, since when Redis still has what was stored."""
        # A Redis that was away may have lost some.
        broken_at = max(self._shared.broken_at, self._connections.broken_at)
        return max(anyio.current_time() - KNOWN_S, broken_at, self._forgotten_at)

    def _key(self, payload: bytes) -> bytes:
        """The XXH3 of an encoded array. Takes no time if `payload` is the object that is remembered."""
        key = self._keys_by_id.get(id(payload))
        return xxhash.xxh3_128_digest(payload) if key is None else key

    def _remember(self, ref: ArrayRef, payload: bytes) -> None:
        key = self._keys_by_id.get(id(payload))
        if key is not None:
            self._references.move_to_end(key)
            return
        key = self._key(payload)
        if key in self._references:
            self._drop(key)
        self._references[key] = payload, ref
        # The object stays alive as long as it is remembered, so that no other has its `id`.
        self._keys_by_id[id(payload)] = key
        self._bytes += len(payload)
        while self._bytes > REMEMBERED_BYTES and len(self._references) > 1:
            self._drop(next(iter(self._references)))

    def _drop(self, key: bytes) -> None:
        payload, _ = self._references.pop(key)
        del self._keys_by_id[id(payload)]
        self._bytes -= len(payload)

    def _not_stored(self, refs: Iterable[ArrayRef]) -> list[ArrayRef]:
        since = self.kept_since
        return [ref for ref in refs if self._stored.get(ref, -math.inf) <= since]

    async def _write(self, payloads: Mapping[ArrayRef, bytes]) -> None:
        began = anyio.current_time()
        commands: list[tuple[Any, ...]] = []
        size = 0
        for key, number, chunk in self._chunks(payloads):
            # Idempotent: whoever stores this vector writes the same fields.
            commands += [("HSET", key, number, Pieces([chunk])), ("EXPIRE", key, KEPT_S)]
            size += len(chunk)
            if size >= CHUNK_BYTES:
                await self._connections.commands(*commands, refuse_full=True)
                commands, size = [], 0
        if commands:
            await self._connections.commands(*commands, refuse_full=True)
        since = began - KNOWN_S
        self._stored = {ref: at for ref, at in self._stored.items() if at > since} | dict.fromkeys(payloads, began)

    def _chunks(self, payloads: Mapping[ArrayRef, bytes]) -> Iterator[tuple[str, int, memoryview]]:
        for ref, payload in payloads.items():
            raw = payload_parts(payload)[2]
            for number in range(chunk_count(len(raw))):
                yield self._keys.vector(ref.blob), number, raw[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]

    # --- reading ------------------------------------------------------------------------------------------------------

    async def fetch(self, ref: ArrayRef) -> np.ndarray[Any, Any]:
        """The array of a reference to a vector, compared with the digest in its name. The array is read-only.

        Raises:
            VectorMissing: a chunk is missing, or the content does not match the reference.
            BusUnavailable: Redis does not answer.
        """
        key, count = self._keys.vector(ref.blob), chunk_count(ref.nbytes)
        # Not allocated ahead: the size in the reference comes from the wire and may be wrong.
        raw, state = bytearray(), content_hash(ref.dtype, ref.shape)
        for number in range(count):
            chunk, _ = await self._connections.commands(("HGET", key, number), ("EXPIRE", key, KEPT_S))
            if chunk is None:
                raise VectorMissing(f"chunk {number} of {count} is missing: it has expired, or Redis has lost it")
            raw += chunk
            state.update(chunk)
            if len(raw) > ref.nbytes:
                break
        if len(raw) != ref.nbytes or state.digest() != ref.digest:
            raise VectorMissing("its content does not match the reference")
        return array_from_raw(ref.dtype, ref.shape, raw)
