"""The gate of an engine: who may submit to it, steer its traces, install edits and drain it.

The adapter verifies a signature before it decodes what the signature is of. Without a keyring it verifies none, and
everybody who can write to the Redis may do all of this.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

import anyio.to_thread

from tracewire_bus.domain.identity import Key, KeyFileError, Keyring, SignatureRefused, Signer
from tracewire_bus.domain.limit_table import DEFAULTS, Limits
from tracewire_bus.domain.limits import check_size
from tracewire_bus.store.control import Order
from tracewire_bus.store.proofs import cancel_content, drain_content, pause_content, removal_content
from tracewire_bus.transport.loops import running_loop
from tracewire_bus.wire.signing import Envelope, Kind, decode_envelope, unwrap

from .engine_api import Rejection

__all__ = ["Admitted", "Gate", "Identity", "refused"]

logger = logging.getLogger("tracewire")

#: Content of up to this many bytes is verified on the event loop.
_SHORT = 1024 * 1024


@dataclass(frozen=True)
class Identity:
    """Whose signatures an engine accepts, and its own.

    `unsigned` says whether it accepts what nobody has signed, and `reason` why. `signer` signs its finals.
    """

    keyring: Keyring | None = None
    unsigned: bool = True
    reason: str = ""
    signer: Signer | None = None


class Admitted(NamedTuple):
    """Content that is accepted: without its signature, with the key that has signed it, and the signature."""

    content: bytes
    key: Key | None = None
    envelope: Envelope | None = None


def refused(message: str) -> Rejection:
    """A submission whose signature is not accepted."""
    return Rejection("signature", message, type="SignatureRefused")


class Gate:
    """Verifies for one engine. `prefix` is its bus's, `model` its model, `engine` its name."""

    def __init__(self, identity: Identity, prefix: str, model: str, engine: str, limits: Limits = DEFAULTS) -> None:
        self._limits = limits
        self._keyring = identity.keyring
        self._unsigned = identity.unsigned
        self._reason = identity.reason
        self._prefix, self._model, self._engine = prefix, model, engine
        #: Whether the keyring's file was looked at in this turn of the event loop.
        self._looked = False
        if self._keyring is not None:
            self._keyring.on_error = _unreadable

    @property
    def strict(self) -> bool:
        """Whether orders and changes without a valid signature are refused."""
        return not self._unsigned

    def key(self, id: str) -> Key | None:
        """The key of this id, if the keyring has it."""
        return None if self._keyring is None else self._keyring.get(id)

    def keyring_state(self) -> object:
        """Differs whenever the keys have changed."""
        return None if self._keyring is None else self._keyring.state

    # --- content ------------------------------------------------------------------------------------------------------

    async def submission(self, trace: str, data: bytes, queued_at: float) -> Admitted:
        """Verify a queue entry.

        Args:
            trace: the trace's id by its queue entry.
            data: the entry's data.
            queued_at: when it was queued, in seconds since the epoch.

        Raises:
            Rejection: it is not accepted.
            LimitExceeded: it is too large.
        """
        check_size(len(data), self._limits)
        try:
            if len(data) <= _SHORT:
                admitted = self._content("submit", trace, data, queued_at, shared=True)
            else:
                admitted = await anyio.to_thread.run_sync(self._content, "submit", trace, data, queued_at)
            if admitted.key is not None:
                admitted.key.demand("submit")
        except SignatureRefused as error:
            raise refused(str(error)) from None
        return admitted

    def edit(self, name: str, data: bytes, installed_at: float) -> tuple[bytes, Key | None]:
        """Verify an installed edit. Returns the encoded edit, and the key that has signed it.

        The key must have been valid when the edit was installed. It must be in the keyring, and not revoked, now.

        Raises:
            ValueError: it is not accepted.
        """
        try:
            content, key, _ = self._content("edit", name, data, installed_at)
            if key is not None:
                key.demand("edit")
        except SignatureRefused as error:
            raise ValueError(f"signature: {error}") from None
        return content, key

    def removal(self, name: str, since: int, version: int, proof: bytes) -> Key | None:
        """Verify the removal of this version of an edit, for an engine that runs version `since`.

        Returns the key that has signed it.

        Raises:
            SignatureRefused: it is not accepted.
        """
        if proof and version < since:
            raise SignatureRefused(f"the removal is of version {version}, and version {since} is installed")
        content = removal_content(self._model, version)
        key = self._verified("remove edit", name, proof, content, timely=False)
        if key is not None:
            key.demand("edit")
        return key

    def _is_due(self) -> bool:
        """Whether to look at the keyring's file for a submission: once in a turn of the event loop.

        What comes later is verified in a later turn, so a key that was revoked before a submission came is refused.
        """
        if self._looked:
            return False
        self._looked = True
        running_loop().call_soon(self._turn)
        return True

    def _turn(self) -> None:
        self._looked = False

    def _content(self, kind: Kind, name: str, data: bytes, at: float, *, shared: bool = False) -> Admitted:
        try:
            envelope, content = unwrap(data)
        except ValueError as error:
            raise SignatureRefused(f"the signature cannot be read: {error}") from None
        if envelope is None or self._keyring is None:
            self._demand_unsigned()
            return Admitted(content)
        # Asked only now: what is refused above has looked at no file.
        self._keyring.held = shared and not self._is_due()
        try:
            # An edit is read again whenever edits or keys change, and outlives its key's validity.
            verify = self._keyring.verify_stored if kind == "edit" else self._keyring.verify
            key = verify(envelope, kind, self._prefix, self._model, name, content, at=at)
        finally:
            self._keyring.held = False
        return Admitted(content, key, envelope)

    def _demand_unsigned(self) -> None:
        if not self._unsigned:
            raise SignatureRefused(
                f"this engine accepts only what a key of its keyring has signed (--unsigned refuse: {self._reason})"
            )

    # --- orders -------------------------------------------------------------------------------------------------------

    def order(self, order: Order, owner: Key | None) -> Key | None:
        """Verify an order for a trace whose submission `owner` has signed. Returns the key that has signed the order.

        Raises:
            SignatureRefused: the order is not accepted.
        """
        if order.kind == "cancel":
            content = cancel_content(order.by, order.reason)
        elif order.kind == "drain":
            return self._drain(order)
        else:
            content = pause_content(order.by, order.within_s, order.then)
        return self.proof(order.kind, order.trace, order.proof, content, owner)

    def _drain(self, order: Order) -> Key | None:
        key = self._verified("drain", self._engine, order.proof, drain_content(order.by, order.within_s), timely=True)
        if key is not None:
            key.demand("operate")
        return key

    def proof(
        self, kind: Kind, trace: str, proof: bytes, content: bytes, owner: Key | None, *, timely: bool = True
    ) -> Key | None:
        """Verify the proof of an order, or of a change, for a trace whose submission `owner` has signed.

        Returns the key that has signed it; None if it is not signed, and that is accepted.

        Raises:
            SignatureRefused: it is not accepted.
        """
        key = self._verified(kind, trace, proof, content, timely=timely)
        if key is not None and not key.may("steer-any"):
            key.demand("steer")
            if owner is None or owner.tenant != key.tenant:
                whose = "nobody known" if owner is None else f"tenant {owner.tenant!r}"
                raise SignatureRefused(
                    f"key {key.id!r} of tenant {key.tenant!r} may not {kind} a trace of {whose} (right 'steer-any')"
                )
        return key

    def _verified(self, kind: Kind, name: str, proof: bytes, content: bytes, *, timely: bool) -> Key | None:
        if not proof or self._keyring is None:
            self._demand_unsigned()
            return None
        try:
            envelope = decode_envelope(proof)
        except ValueError as error:
            raise SignatureRefused(f"the signature cannot be read: {error}") from None
        return self._keyring.verify(envelope, kind, self._prefix, "", name, content, timely=timely)


def _unreadable(error: KeyFileError) -> None:
    logger.error("the keyring cannot be read, so no key is accepted: %s", error)
