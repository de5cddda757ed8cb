"""The signatures that one process puts on what it writes, if it has a key."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

import msgspec

from tracewire_bus.domain.identity import Signer, signed, verify_final
from tracewire_bus.transport.loops import Future, running_loop
from tracewire_bus.wire.messages import Final as FinalEvent
from tracewire_bus.wire.signing import MOST_AT_ONCE, Kind, wrap

__all__ = ["Proofs", "cancel_content", "change_content", "drain_content", "pause_content", "removal_content"]

_encoder = msgspec.msgpack.Encoder()

#: So many turns of the event loop without another submission end a round: of a process that has signed several at
#: once before, and of one that has not.
_EMPTY_TURNS: Final = 16
_EMPTY_TURNS_ALONE: Final = 2


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
    """Texts that are signed at once, each with a future that gets the signature and its digests.

    Args:
        sign: is called once with the round, when the event loop has turned for as long as that brings texts.
        most_empty: so many turns that bring none end the round.
    """

    __slots__ = ("_empty", "_loop", "_most_empty", "_seen", "_sign", "texts", "waiting")

    def __init__(self, sign: Callable[[_Round], None], most_empty: int) -> None:
        self.texts: list[bytes] = []
        self.waiting: list[Future[tuple[bytes, bytes]]] = []
        self._sign = sign
        self._most_empty = most_empty
        #: How many texts there were in the turn before; one makes the round. How many turns since have brought none.
        self._seen, self._empty = 1, 0
        self._loop = running_loop()
        # A callback costs a turn less than a task does.
        self._loop.call_soon(self._turn)

    def add(self, text: bytes) -> Future[tuple[bytes, bytes]]:
        """Have a text signed with the others."""
        self.texts.append(text)
        own: Future[tuple[bytes, bytes]] = self._loop.create_future()
        self.waiting.append(own)
        return own

    def _turn(self) -> None:
        count = len(self.texts)
        self._empty = self._empty + 1 if count == self._seen else 0
        self._seen = count
        if self._empty < self._most_empty and count < MOST_AT_ONCE:
            self._loop.call_soon(self._turn)
        else:
            self._sign(self)


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
        #: Whether the last signature covered several.
        self._several = False

    def on(self, prefix: str) -> Proofs:
        """The same for the bus of this prefix."""
        return Proofs(self.signer, self._engine_keys, prefix)

    async def submission(self, model: str, trace: str, data: bytes) -> bytes:
        """An encoded submission behind its signature.

        One signature covers those of successive turns of the event loop. A round ends when it is full, or when some
        turns have brought none: two if the round before had one submission, `_EMPTY_TURNS` if it had several. No
        call sleeps: a busy loop does its other work in these turns. Traces that are signed together also begin and end
        together, so that fewer signatures cover their finals, and fewer round trips carry their events.
        """
        if self.signer is None:
            return data
        bare, text = self.signer.unsigned("submit", self._prefix, model, trace, data)
        mine = self._round
        if mine is None or len(mine.texts) >= MOST_AT_ONCE:
            mine = self._round = _Round(self._sign, _EMPTY_TURNS if self._several else _EMPTY_TURNS_ALONE)
        try:
            signature, digests = await mine.add(text)
        finally:
            # Nobody waits for a round whose callers were all cancelled. An event loop that ends may not turn again.
            if self._round is mine and all(one.done() for one in mine.waiting):
                self._round = None
        return wrap(signed(bare, signature, digests), data)

    def _sign(self, done: _Round) -> None:
        if self._round is done:
            self._round = None
        self._several = len(done.texts) > 1
        # Callers that were cancelled do not wait.
        waiting = [own for own in done.waiting if not own.done()]
        if waiting and self.signer is not None:
            found = self.signer.sign(done.texts)
            for own in waiting:
                own.set_result(found)

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
