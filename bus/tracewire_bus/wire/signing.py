"""Signatures of what clients and engines write: what a signature covers, and how it travels.

A signature is Ed25519 over the kind of the message, the bus's prefix, the model, the trace (for an edit its name, for
an order to an engine the engine), the key's id, the time at which the signature expires, a nonce, and a digest of the
content. An `Envelope` has all of these that a reader does not know from elsewhere.

Before a submission and an edit, the envelope stands in front of the encoded message: a byte that begins no message,
the envelope's length in two bytes, and the envelope. So a reader verifies the content before it decodes the content.
With an order, and in a trace's record, the envelope travels alone, as the order's *proof*. The model is empty there.

The final of a trace has its engine's signature in a field. It covers the encoded final with nothing in that field.

One signature may cover several messages that a process signs at once. It then covers the digests of the texts that
the process would sign for each of them, and travels with these digests.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, Literal, TypeAlias

import msgspec

from .packing import decoder

__all__ = [
    "MOST_AT_ONCE",
    "SIGNATURE_BYTES",
    "Envelope",
    "Kind",
    "decode_envelope",
    "encode_envelope",
    "is_among",
    "joint_digests",
    "joint_text",
    "signed_text",
    "unwrap",
    "with_signature",
    "without_signature",
    "wrap",
]

Kind: TypeAlias = Literal["submit", "steer", "cancel", "pause", "resume", "drain", "edit", "remove edit", "final"]

SIGNATURE_BYTES: Final = 64
#: Begins signed content. No message in msgpack begins with it.
_MARK: Final = 0xC1
_LENGTH: Final = 2
#: Most messages that one signature covers.
MOST_AT_ONCE: Final = 32
_DIGEST: Final = 32
#: Most bytes of an encoded envelope.
_MOST: Final = 512 + MOST_AT_ONCE * _DIGEST
_TEXT: Final = "tracewire signature 1"
#: Begins what a signature of several messages covers. No other signed text begins with it: they are arrays of msgpack.
_JOINT_TEXT: Final = b"tracewire signatures 1"
#: An empty field of bytes, encoded.
_EMPTY: Final = b"\xc4\x00"


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """A signature, and what it covers besides the message.

    `key` is the id of the key that signed, `expires` when the signature expires, in seconds since the epoch, and
    `nonce` 16 random bytes. `tenant` is the tenant for which the key acts, `""` for its own.
    `digests` are those of all messages that the signature covers (`joint_digests`); empty if it covers this one alone.
    """

    key: str
    expires: int
    nonce: bytes
    signature: bytes = b""
    tenant: str = ""
    digests: bytes = b""


_encoder = msgspec.msgpack.Encoder()
_decode = decoder(Envelope, plain=True)


def signed_text(kind: Kind, prefix: str, model: str, trace: str, envelope: Envelope, content: bytes) -> bytes:
    """The bytes that a key signs."""
    digest = blake2b(content, digest_size=32).digest()
    covered = (
        _TEXT,
        kind,
        prefix,
        model,
        trace,
        envelope.key,
        envelope.expires,
        envelope.nonce,
        envelope.tenant,
        digest,
    )
    return _encoder.encode(covered)


def joint_digests(texts: Sequence[bytes]) -> bytes:
    """The digests of up to `MOST_AT_ONCE` signed texts, by which one signature covers all of them."""
    return b"".join(blake2b(text, digest_size=_DIGEST).digest() for text in texts)


def joint_text(digests: bytes) -> bytes:
    """What a signature of the messages with these digests is of."""
    return _JOINT_TEXT + digests


def is_among(text: bytes, digests: bytes) -> bool:
    """Whether the digest of a signed text is among the digests of up to `MOST_AT_ONCE`."""
    if len(digests) % _DIGEST or len(digests) > MOST_AT_ONCE * _DIGEST:
        return False
    own = blake2b(text, digest_size=_DIGEST).digest()
    at = digests.find(own)
    while at % _DIGEST and at >= 0:
        at = digests.find(own, at + 1)
    return at >= 0


def with_signature(final: bytes, signature: bytes) -> bytes:
    """An encoded final with a signature in its last field, which is empty."""
    return final.removesuffix(_EMPTY) + _encoder.encode(signature)


def without_signature(final: bytes, signature: bytes) -> bytes | None:
    """An encoded final as it was signed; None if this is not its signature."""
    encoded = _encoder.encode(signature)
    if not signature:
        return None
    if final.endswith(encoded):
        return final[: -len(encoded)] + _EMPTY
    # A later version may write fields behind it. Exactly once: somebody else's bytes may repeat it.
    return final.replace(encoded, _EMPTY) if final.count(encoded) == 1 else None


def encode_envelope(envelope: Envelope) -> bytes:
    """Encode an envelope, as a proof."""
    return _encoder.encode(envelope)


def decode_envelope(data: bytes) -> Envelope:
    """Decode a proof.

    Raises:
        ValueError: it is no envelope.
    """
    if len(data) > _MOST:
        raise ValueError(f"a signature takes at most {_MOST} bytes, got {len(data)}")
    found: Envelope = _decode(data)
    return found


def wrap(envelope: Envelope, content: bytes) -> bytes:
    """Put an envelope in front of its content."""
    encoded = _encoder.encode(envelope)
    return b"".join((bytes([_MARK]), len(encoded).to_bytes(_LENGTH, "big"), encoded, content))


def unwrap(data: bytes) -> tuple[Envelope | None, bytes]:
    """The envelope in front of a message, None if there is none, and the message. Nothing is verified.

    Raises:
        ValueError: the envelope is malformed.
    """
    if not data or data[0] != _MARK:
        return None, data
    start = 1 + _LENGTH
    end = start + int.from_bytes(data[1:start], "big")
    if end > len(data):
        raise ValueError("the signature in front of the message is cut off")
    return decode_envelope(data[start:end]), data[end:]
