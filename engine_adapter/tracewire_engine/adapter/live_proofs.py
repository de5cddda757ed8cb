"""Verifies the changes of one trace's live parameters: those that arrive, and those that its record already has.

Redis accepts a change by a script that any client can call. A strict engine applies a change only if its signature is
valid, and undoes any other change in the record. The record keeps with each live parameter the signed change that has
set it (`g:NAME`). So an engine that begins the trace again takes no value that nobody has signed: it begins with the
declared value instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from tracewire_bus.domain.identity import Key, SignatureRefused
from tracewire_bus.store.proofs import change_content
from tracewire_bus.store.trace_records import Opened
from tracewire_bus.wire.live_values import pack_live
from tracewire_bus.wire.packing import decoder
from tracewire_bus.wire.signing import decode_envelope

from .gate import Gate

__all__ = ["LiveProofs", "Undoing"]


class _Change(msgspec.Struct, array_like=True):
    """A `Change` with its parts as they were signed."""

    version: int
    by: msgspec.Raw
    time: int
    values: msgspec.Raw
    proof: bytes = b""


_change = decoder(_Change, plain=True)
_values = decoder(dict[str, msgspec.Raw], plain=True)


class Undoing(NamedTuple):
    """How a refused change is undone: its version, its values, and the values and changes that hold, by name."""

    version: int
    refused: dict[str, bytes]
    holding: dict[str, tuple[bytes, bytes]]


class LiveProofs:
    """The verified live parameters of one trace. `declared` are its live parameters, packed, as it was submitted."""

    def __init__(self, gate: Gate, trace: str, owner: Key | None, declared: bytes) -> None:
        self._gate = gate
        self._trace = trace
        self._owner = owner
        #: The packed value that holds, by name, and the signed change that has set it, or `b""`.
        self._holding = {name: (bytes(raw), b"") for name, raw in _values(declared).items()}
        #: The version of the change that each nonce came with.
        self._nonces: dict[bytes, int] = {}

    def begin(self, opened: Opened) -> Opened:
        """A trace's record as an engine may begin with it: without values and changes that nobody has signed."""
        if not self._gate.strict:
            return opened
        changes = self.admitted(opened.changes)
        for name in list(self._holding):
            proof = opened.live_proofs.get(name)
            value = None if proof is None or not self._is_proven(proof) else _of(proof).get(name)
            if proof is not None and value is not None:
                self._holding[name] = value, proof
        live = pack_live({name: value for name, (value, _) in self._holding.items()})
        return msgspec.structs.replace(opened, live=live, changes=changes)

    def _is_proven(self, change: bytes) -> bool:
        """Whether a change in the record was signed. Its signature may have expired since."""
        try:
            self._verify(change, timely=False)
        except SignatureRefused:
            return False
        return True

    def _verify(self, change: bytes, *, timely: bool) -> tuple[_Change, Key | None]:
        try:
            found = _change(change)
        except ValueError as error:
            raise SignatureRefused(f"the change cannot be read: {error}") from None
        content = change_content(bytes(found.by), bytes(found.values))
        return found, self._gate.proof("steer", self._trace, found.proof, content, self._owner, timely=timely)

    def admit(self, change: bytes) -> Key | None:
        """Verify a change that has arrived. Returns the key that has signed it.

        Raises:
            SignatureRefused: it is not accepted.
        """
        return self._admit(change, timely=True)

    def _admit(self, change: bytes, *, timely: bool) -> Key | None:
        found, key = self._verify(change, timely=timely)
        if key is not None:
            nonce = decode_envelope(found.proof).nonce
            if self._nonces.setdefault(nonce, found.version) != found.version:
                raise SignatureRefused(f"the change of key {key.id!r} was replayed")
        if self._gate.strict:
            self._holding.update({name: (value, change) for name, value in _of(change).items()})
        return key

    def admitted(self, changes: Sequence[bytes]) -> list[bytes]:
        """Those of the changes in a record that are accepted. Their signatures may have expired since."""
        kept = []
        for change in changes:
            with suppress(SignatureRefused):
                self._admit(change, timely=False)
                kept.append(change)
        return kept

    def undo(self, change: bytes) -> Undoing | None:
        """How the trace's record is mended after a refused change; None if the change cannot be read."""
        try:
            found = _change(change)
            refused = _of(change)
        except ValueError:
            return None
        holding = {name: self._holding[name] for name in refused if name in self._holding}
        return Undoing(found.version, refused, holding)


def _of(change: bytes) -> dict[str, bytes]:
    """The packed values of a change, by name."""
    try:
        return {name: bytes(raw) for name, raw in _values(_change(change).values).items()}
    except ValueError:
        return {}
