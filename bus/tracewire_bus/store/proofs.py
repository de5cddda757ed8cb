"""The signatures that one process puts on what it writes, if it has a key."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from tracewire_bus.domain.identity import Signer, verify_final
from tracewire_bus.wire.messages import Final as FinalEvent
from tracewire_bus.wire.signing import Kind

__all__ = ["Proofs", "cancel_content", "change_content", "drain_content", "pause_content"]

_encoder = msgspec.msgpack.Encoder()


def change_content(author: bytes, values: bytes) -> bytes:
    """What the proof of a change of live parameters covers: the encoded author, and the packed values."""
    return author + values


def cancel_content(by: str, reason: str) -> bytes:
    """What the proof of a cancellation covers."""
    return _encoder.encode((by, reason))


def pause_content(by: str, within_s: float | None = None, then: str = "") -> bytes:
    """What the proof of a pause, or of a resumption, covers."""
    return _encoder.encode((by,) if within_s is None else (by, within_s, then))


def drain_content(by: str, within_s: float | None) -> bytes:
    """What the proof of an order to drain covers."""
    return _encoder.encode((by, within_s))


class Proofs:
    """Signs what one process writes, and checks who has signed finals.

    Args:
        signer: signs; without one, content stays as it is, and proofs are empty.
        engine_keys: the public keys of the engines whose finals are genuine, in hexadecimal; without any, all are.
        prefix: of the bus.
    """

    def __init__(self, signer: Signer | None = None, engine_keys: Collection[str] = (), prefix: str = "") -> None:
        self.signer = signer
        self._engine_keys = engine_keys
        self._prefix = prefix

    def on(self, prefix: str) -> Proofs:
        """The same for the bus of this prefix."""
        return Proofs(self.signer, self._engine_keys, prefix)

    def content(self, kind: Kind, model: str, name: str, data: bytes) -> bytes:
        """A submission of the trace `name`, or an edit of this name, behind its signature."""
        return data if self.signer is None else self.signer.wrapped(kind, self._prefix, model, name, data)

    def order(self, kind: Kind, trace: str, content: bytes) -> bytes:
        """The proof of an order for a trace, or for the engine `trace`."""
        return b"" if self.signer is None else self.signer.proof(kind, self._prefix, trace, content)

    def is_genuine(self, trace: str, data: bytes | memoryview, final: FinalEvent) -> bool:
        """Whether an engine that is trusted has signed a trace's final. `data` is the final, encoded."""
        if not self._engine_keys:
            return True
        return verify_final(self._engine_keys, self._prefix, trace, bytes(data), final.signature)
