"""Signatures of what clients and engines write: what a signature covers, and how it travels.

A signature is Ed25519 over the kind of the message, the bus's prefix, the model, the trace (for an edit its name, for
an order to an engine the engine), the key's id, the time at which the signature expires, a nonce, and a digest of the
content. An `Envelope` has all of these that a reader does not know from elsewhere.

Before a submission and an edit, the envelope stands in front of the encoded message: a byte that begins no message,
the envelope's length in two bytes, and the envelope. So a reader verifies the content before it decodes the content.
With an order, and in a trace's record, the envelope travels alone, as the order's *proof*. The model is empty there.

The final of a trace has its engine's signature in a field. It covers the encoded final with zero bytes in that field.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final, Literal, TypeAlias

import msgspec

__all__ = ["SIGNATURE_BYTES", "Envelope", "Kind", "decode_envelope", "encode_envelope", "signed_text", "unwrap", "wrap"]

Kind: TypeAlias = Literal["submit", "steer", "cancel", "pause", "resume", "drain", "edit", "remove edit", "final"]

SIGNATURE_BYTES: Final = 64
#: Begins signed content. No message in msgpack begins with it.
_MARK: Final = 0xC1
_LENGTH: Final = 2
#: Most bytes of an encoded envelope.
_MOST: Final = 512
_TEXT: Final = "tracewire signature 1"


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """A signature, and what it covers besides the message.

    `key` is the id of the key that signed, `expires` when the signature expires, in seconds since the epoch, and
    `nonce` 16 random bytes. `tenant` is the tenant for which the key acts, `""` for its own.
    """

    key: str
    expires: int
    nonce: bytes
    signature: bytes = b""
    tenant: str = ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


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
    return _decoder.decode(data)


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
