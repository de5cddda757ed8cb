"""References to bytes outside Redis: the deltas of an output that are too large for Redis.

Such an output's `deltas` are one msgpack extension, a `BulkRange`, in place of the list. The bytes that the range
names are the encoded list itself. So the same consumers decode it, once they have the bytes.
"""

from __future__ import annotations

from typing import Final

import msgspec
import xxhash

from .pieces import Pieces
from .refs import BULK

__all__ = ["BulkRange", "bulk_digest", "bulk_range", "encode_bulk_range"]

#: The first bytes of msgpack extensions. A list begins with another byte.
_EXTENSIONS: Final = frozenset((0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8))


class BulkRange(msgspec.Struct, array_like=True, frozen=True):
    """Bytes `offset` to `offset + nbytes` of a segment of a bulk store.

    Attributes:
        store: the id of the store.
        segment: the name of the segment in the store.
        offset, nbytes: where the bytes lie in the segment.
        digest: the XXH3 digest of the bytes, 16 bytes.
    """

    store: str
    segment: str
    offset: int
    nbytes: int
    digest: bytes


_encoder = msgspec.msgpack.Encoder()
_extension = msgspec.msgpack.Decoder(msgspec.msgpack.Ext)
_range = msgspec.msgpack.Decoder(BulkRange)


def encode_bulk_range(where: BulkRange) -> msgspec.Raw:
    """A range as it stands in place of an output's deltas."""
    return msgspec.Raw(_encoder.encode(msgspec.msgpack.Ext(BULK, _encoder.encode(where))))


def bulk_range(deltas: bytes | memoryview | msgspec.Raw) -> BulkRange | None:
    """The range that stands in place of an output's encoded deltas; `None` if the deltas themselves stand there.

    Raises:
        msgspec.MsgspecError: it is another extension, or no range.
    """
    raw = memoryview(deltas)
    if not raw.nbytes or raw[0] not in _EXTENSIONS:
        return None
    extension = _extension.decode(raw)
    if extension.code != BULK:
        raise msgspec.ValidationError(f"an extension of type {extension.code} in place of deltas")
    found = _range.decode(extension.data)
    if found.offset < 0 or found.nbytes < 0 or len(found.digest) != 16:
        raise msgspec.ValidationError(f"an impossible range of bulk: {found}")
    return found


def bulk_digest(data: bytes | memoryview | Pieces) -> bytes:
    """The digest of a range's bytes: XXH3, of 128 bits."""
    state = xxhash.xxh3_128()
    for piece in data.buffers if isinstance(data, Pieces) else (data,):
        state.update(piece)
    return state.digest()
