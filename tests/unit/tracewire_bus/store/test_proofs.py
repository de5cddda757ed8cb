"""A process with a key signs what it writes; one without leaves it as it is."""

from __future__ import annotations

from pathlib import Path

from tests.support.identities import Identities
from tracewire_bus.store.proofs import Proofs
from tracewire_bus.wire.codec import decode_event, sign_final
from tracewire_bus.wire.messages import Final
from tracewire_bus.wire.signing import decode_envelope, unwrap


def test_content_and_orders_are_signed_for_one_bus(tmp_path: Path) -> None:
    keys = Identities(tmp_path)
    proofs = Proofs(keys.signer("alice")).on("tw")
    envelope, content = unwrap(proofs.content("submit", "m", "t", b"x"))
    assert envelope is not None
    assert keys.ring.verify(envelope, "submit", "tw", "m", "t", content).id == "alice"
    order = decode_envelope(proofs.order("cancel", "t", b"x"))
    assert keys.ring.verify(order, "cancel", "tw", "", "t", b"x").id == "alice"
    assert order.nonce != decode_envelope(proofs.order("cancel", "t", b"x")).nonce


def test_without_a_key_nothing_is_signed() -> None:
    assert Proofs().content("submit", "m", "t", b"x") == b"x"
    assert Proofs().order("cancel", "t", b"x") == b""


def test_finals_are_genuine_if_a_trusted_engine_has_signed_them(tmp_path: Path) -> None:
    engine = Identities(tmp_path).signer("engine")
    data = sign_final(Final(attempt=1, seq=0, status="finished"), lambda text: engine.sign_final("tw", "t", text))
    final = decode_event(data)
    assert isinstance(final, Final)
    assert Proofs(None, [engine.public], "tw").is_genuine("t", memoryview(data), final)
    assert not Proofs(None, [engine.public], "tx").is_genuine("t", data, final)
    assert not Proofs(None, ["ab" * 32], "tw").is_genuine("t", data, final)
    assert Proofs().is_genuine("t", data, final)
