"""The signatures that one process puts on what it writes, if it has a key."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import anyio
import anyio.lowlevel
import msgspec

from tracewire_bus.domain.identity import Signer, signed, verify_final
from tracewire_bus.wire.messages import Final as FinalEvent
from tracewire_bus.wire.signing import MOST_AT_ONCE, Kind, wrap

__all__ = ["Proofs", "cancel_content", "change_content", "drain_content", "pause_content", "removal_content"]

_encoder = msgspec.msgpack.Encoder()

#: How long a process that has just signed several submissions at once waits for more of them, in seconds.
_GATHER_S: Final = 3e-3


def change_content(author: bytes, values: bytes) -> bytes:
    """What the proof of a change of live parameters covers: the encoded author, and the packed values."""
    return author + values


def cancel_content(by: str, reason: str) -> bytes:
    """What the proof of a cancellation covers."""
    return _encoder.encode((by, reason))


def pause_content(by: str, within_s: float | None = None, then: str = "") -> bytes:
    """What the proof of a pause, or of a resumption, covers."""
    return _encoder.encode((by,) if within_s is None else (by, within_s, then))


def removal_content(model: str, version: int) -> bytes:
    """What the proof of the removal of an edit of this version covers."""
    return _encoder.encode((model, version))


def drain_content(by: str, within_s: float | None) -> bytes:
    """What the proof of an order to drain covers."""
    return _encoder.encode((by, within_s))


class _Round:
    """Texts that are signed at once."""

    def __init__(self) -> None:
        self.texts: list[bytes] = []
        self.signature = self.digests = b""
        self.full = anyio.Event()
        self.done = anyio.Event()


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
        #: The submissions that are signed next.
        self._round: _Round | None = None
        #: How many the last signature covered.
        self._covered = 0

    def on(self, prefix: str) -> Proofs:
        """The same for the bus of this prefix."""
        return Proofs(self.signer, self._engine_keys, prefix)

    async def submission(self, model: str, trace: str, data: bytes) -> bytes:
        """An encoded submission behind its signature.

        One signature covers those of one turn of the event loop. If the last signature covered several, the next one
        covers those that come within `_GATHER_S` of the first. The traces that are gathered so also run, and end,
        together, so that fewer signatures cover their finals, and fewer round trips carry them.
        """
        if self.signer is None:
            return data
        bare, text = self.signer.unsigned("submit", self._prefix, model, trace, data)
        mine = self._round
        if mine is not None and len(mine.texts) < MOST_AT_ONCE:
            mine.texts.append(text)
            if len(mine.texts) == MOST_AT_ONCE:
                mine.full.set()
            await mine.done.wait()
        else:
            mine = self._round = _Round()
            mine.texts.append(text)
            try:
                await self._gather(mine)
            finally:
                # Also if this call is cancelled: others wait for the signature.
                if self._round is mine:
                    self._round = None
                mine.signature, mine.digests = self.signer.sign(mine.texts)
                self._covered = len(mine.texts)
                mine.done.set()
        return wrap(signed(bare, mine.signature, mine.digests), data)

    async def _gather(self, mine: _Round) -> None:
        """Wait until a round of submissions is to be signed."""
        await anyio.lowlevel.checkpoint()
        if self._covered > 1 and not mine.full.is_set():
            with anyio.move_on_after(_GATHER_S):
                await mine.full.wait()

    def finals(self, finals: Sequence[tuple[str, bytes]]) -> list[bytes]:
        """The encoded finals of these traces with their signatures."""
        return [data for _, data in finals] if self.signer is None else self.signer.sign_finals(self._prefix, finals)

    def content(self, kind: Kind, model: str, name: str, data: bytes) -> bytes:
        """A submission of the trace `name`, or an edit of this name, behind a signature of its own."""
        return data if self.signer is None else self.signer.wrapped(kind, self._prefix, model, name, data)

    def order(self, kind: Kind, trace: str, content: bytes) -> bytes:
        """The proof of an order for a trace, or for the engine `trace`."""
        return b"" if self.signer is None else self.signer.proof(kind, self._prefix, trace, content)

    def is_genuine(self, trace: str, data: bytes | memoryview, final: FinalEvent) -> bool:
        """Whether an engine that is trusted has signed a trace's final. `data` is the final, encoded."""
        if not self._engine_keys:
            return True
        return verify_final(self._engine_keys, self._prefix, trace, bytes(data), final.signature)
