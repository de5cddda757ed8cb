"""Marks of the signed submissions that engines have taken, so that none runs twice.

A submission comes again when its engine was lost or has left: then Redis hands it out as a later attempt. It comes
again to the same engine, as the same attempt, when Redis did not answer while the engine began it. It must not come
again otherwise. So Redis keeps with its nonce the attempt, and a word that only this engine has, until the trace has
ended. The script that opens the trace's record compares and writes them (`record_open.lua`).
"""

from __future__ import annotations

import secrets
from itertools import count

from tracewire_bus.store.trace_records import NonceMark
from tracewire_bus.wire.signing import Envelope

__all__ = ["Nonces"]


class Nonces:
    """The marks that one engine makes."""

    def __init__(self) -> None:
        #: By nonce, the words of the submissions that this engine has taken, and whose traces have not ended here.
        self._open: dict[bytes, str] = {}
        #: Begins the words of this engine.
        self._own = secrets.token_hex(8)
        self._numbers = count()

    def mark(self, envelope: Envelope) -> NonceMark:
        """The mark of a submission: the same until `end`."""
        word = self._open.get(envelope.nonce)
        if word is None:
            word = self._open[envelope.nonce] = f"{self._own}{next(self._numbers):x}"
        return NonceMark(envelope.key, envelope.nonce, word)

    def end(self, envelope: Envelope) -> None:
        """Note that the trace of a submission runs here no longer."""
        self._open.pop(envelope.nonce, None)
