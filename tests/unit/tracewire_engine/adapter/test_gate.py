"""The gate verifies before anything is decoded, and says what it refuses."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import anyio.lowlevel
import msgspec
import pytest

from tests.support.identities import Identities, signing_bus
from tracewire_bus.bus import Bus
from tracewire_bus.domain.identity import Key, Keyring, SignatureRefused
from tracewire_bus.domain.limits import LimitExceeded
from tracewire_bus.store.control import Order
from tracewire_bus.store.proofs import Proofs, cancel_content, drain_content, pause_content
from tracewire_bus.wire.messages import Ablate, Edit
from tracewire_engine.adapter.engine_api import Rejection
from tracewire_engine.adapter.gate import Gate, Identity


@pytest.fixture
def keys(tmp_path: Path) -> Identities:
    return Identities(tmp_path)


def gate(keys: Identities, *, unsigned: bool = False, ring: bool = True) -> Gate:
    return Gate(Identity(Keyring(keys.ring.path) if ring else None, unsigned, "so"), "tw", "m", "e")


def proofs(keys: Identities, id: str, prefix: str = "tw") -> Proofs:
    return Proofs(keys.signer(id), prefix=prefix)


async def test_a_submission_comes_without_its_signature_and_with_its_key(keys: Identities) -> None:
    # What is no submission at all: nobody has decoded it.
    data = proofs(keys, "alice").content("submit", "m", "t", b"\xff" * 10)
    admitted = await gate(keys).submission("t", data, time.time())
    assert admitted.content == b"\xff" * 10
    assert admitted.key is not None
    assert admitted.key.tenant == "red"
    large = proofs(keys, "alice").content("submit", "m", "t", bytes(2_000_000))
    assert len((await gate(keys).submission("t", large, time.time())).content) == 2_000_000


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda keys: b"unsigned", r"only what a key of its keyring has signed \(--unsigned refuse: so\)"),
        (lambda keys: proofs(keys, "olga").content("submit", "m", "t", b"x"), "has no right 'submit'"),
        (lambda keys: proofs(keys, "alice").content("edit", "m", "t", b"x"), "the signature is not of key"),
        (lambda keys: proofs(keys, "alice").content("submit", "n", "t", b"x"), "the signature is not of key"),
        (lambda keys: proofs(keys, "alice").content("submit", "m", "u", b"x"), "the signature is not of key"),
        (lambda keys: proofs(keys, "alice", "ty").content("submit", "m", "t", b"x"), "the signature is not of key"),
        (lambda keys: proofs(keys, "alice").content("submit", "m", "t", b"x") + b"y", "the signature is not of key"),
        (lambda keys: b"\xc1\xff\xff", "cannot be read"),
        (lambda keys: b"\xc1\0\1\xff", "cannot be read"),
    ],
    ids=["unsigned", "right", "kind", "model", "trace", "prefix", "content", "cut off", "no envelope"],
)
async def test_any_other_submission_is_refused(made: Any, says: str, keys: Identities) -> None:
    with pytest.raises(Rejection, match=says) as refused:
        await gate(keys).submission("t", made(keys), time.time())
    assert (refused.value.failure.field, refused.value.failure.type) == ("signature", "SignatureRefused")


async def test_submissions_of_one_turn_of_the_event_loop_share_a_look_at_the_keyring(
    keys: Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    look = Keyring._look

    def counted(ring: Keyring) -> None:
        nonlocal looks
        looks += 1
        look(ring)

    strict = gate(keys)
    data = proofs(keys, "alice").content("submit", "m", "t", b"x")
    monkeypatch.setattr(Keyring, "_look", counted)
    for _ in range(3):
        assert (await strict.submission("t", data, time.time())).key is not None
    assert looks == 1
    await anyio.lowlevel.checkpoint()
    # What comes in a later turn is verified by the file as it is then.
    ring = Keyring(keys.ring.path)
    ring.write([one for one in ring.listed() if one.id != "alice"])
    for other in (b"unsigned", b"\xc1\xff\xff"):
        # What is refused without a look does not count as one.
        with pytest.raises(Rejection):
            await strict.submission("t", other, time.time())
    with pytest.raises(Rejection, match="no key 'alice'"):
        await strict.submission("t", data, time.time())
    # An order is always verified by the file as it is.
    before = looks
    with pytest.raises(SignatureRefused):
        strict.order(order(keys, "cancel", "alice"), None)
    assert looks == before + 1


async def test_a_submission_that_is_too_large_is_not_looked_at(keys: Identities) -> None:
    with pytest.raises(LimitExceeded):
        await gate(keys).submission("t", bytes(40_000_000), time.time())


async def test_what_is_not_signed_may_be_accepted(keys: Identities) -> None:
    lenient = gate(keys, unsigned=True)
    assert (await lenient.submission("t", b"x", time.time())).key is None
    # A bad signature is refused where none would be needed.
    with pytest.raises(Rejection):
        await lenient.submission("t", proofs(keys, "alice").content("submit", "n", "t", b"x"), time.time())
    # Without a keyring nothing can be verified.
    signed = proofs(keys, "alice").content("submit", "m", "t", b"x")
    assert await gate(keys, unsigned=True, ring=False).submission("t", signed, time.time()) == (b"x", None, None)
    with pytest.raises(Rejection):
        await gate(keys, ring=False).submission("t", signed, time.time())


def test_an_edit_needs_the_right(keys: Identities) -> None:
    data = proofs(keys, "alice").content("edit", "m", "calm", b"x")
    content, key = gate(keys).edit("calm", data, time.time())
    assert content == b"x"
    assert key is not None
    for name, other, at in (
        ("loud", data, time.time()),
        ("calm", proofs(keys, "bob").content("edit", "m", "calm", b"x"), time.time()),
        ("calm", b"x", time.time()),
        # Somebody installs again, much later, what once was signed.
        ("calm", data, time.time() + 86400),
    ):
        with pytest.raises(ValueError, match="signature: "):
            gate(keys).edit(name, other, at)


async def test_an_edit_is_judged_by_its_key_at_the_time_of_its_installation(keys: Identities, bus: Bus) -> None:
    """So it runs on after its key was rotated, and ends if the key is revoked or leaves the keyring."""
    known = {key.id: key for key in keys.ring.listed()}
    alice = known.pop("alice")

    async def problem(**changed: Any) -> str:
        keys.ring.write([*known.values(), msgspec.structs.replace(alice, **changed)])
        strict = Gate(Identity(Keyring(keys.ring.path), False, "so"), bus.keys.prefix, "m", "e")
        (one,) = (await bus.edits.load("m", strict.edit)).edits
        assert (one.edit is None) == bool(one.problem)
        return one.problem

    async with signing_bus(bus, keys.signer("alice")) as own:
        await own.edits.install("m", Edit(name="calm", interventions=[Ablate("residual(0)")]))
    assert not await problem()
    installed = (await bus.edits.load("m")).edits[0].time
    assert installed < time.time()
    assert not await problem(valid_until=installed)
    assert "key 'alice' was not valid when this came" in await problem(valid_until=installed - 1)
    assert "key 'alice' was not valid when this came" in await problem(valid_from=installed + 1)
    assert "key 'alice' was revoked" in await problem(valid_until=installed, revoked=time.time())
    assert "no key 'alice' is known here" in await problem(id="else")
    # What is no edit needs a key that is valid now.
    keys.ring.write([*known.values(), msgspec.structs.replace(alice, valid_until=installed)])
    submission = proofs(keys, "alice").content("submit", "m", "t", b"x")
    with pytest.raises(Rejection, match="not valid at this time"):
        await gate(keys).submission("t", submission, installed)


def order(keys: Identities, kind: Any, id: str, *, trace: str = "t", proof: bytes | None = None) -> Order:
    content = {
        "cancel": cancel_content("c", "r"),
        "pause": pause_content("c"),
        "resume": pause_content("c"),
        "drain": drain_content("c", None),
    }[kind]
    proof = proofs(keys, id).order(kind, trace or "e", content) if proof is None else proof
    return Order(kind, trace, by="c", reason="r" if kind == "cancel" else "", proof=proof)


def owner(keys: Identities, id: str) -> Key:
    found = keys.ring.get(id)
    assert found is not None
    return found


@pytest.mark.parametrize("kind", ["cancel", "pause", "resume"])
def test_an_order_is_for_the_traces_of_its_key_s_tenant(kind: Any, keys: Identities) -> None:
    strict = gate(keys)
    for id in ("alice", "ann", "olga"):
        assert strict.order(order(keys, kind, id), owner(keys, "alice")) is not None
    with pytest.raises(SignatureRefused, match=f"key 'bob' of tenant 'blue' may not {kind} a trace of tenant 'red'"):
        strict.order(order(keys, kind, "bob"), owner(keys, "alice"))
    with pytest.raises(SignatureRefused, match="a trace of nobody known"):
        strict.order(order(keys, kind, "bob"), None)
    taken = order(keys, kind, "alice").proof
    for other in (b"", b"\xff", order(keys, "drain", "alice", trace="").proof):
        with pytest.raises(SignatureRefused):
            strict.order(order(keys, kind, "alice", proof=other), owner(keys, "alice"))
    with pytest.raises(SignatureRefused, match="is of another trace"):
        strict.order(order(keys, kind, "alice", trace="u", proof=taken), owner(keys, "alice"))


def test_an_engine_is_drained_by_operators(keys: Identities) -> None:
    strict = gate(keys)
    key = strict.order(order(keys, "drain", "olga", trace=""), None)
    assert key is not None
    with pytest.raises(SignatureRefused, match="has no right 'operate'"):
        strict.order(order(keys, "drain", "alice", trace=""), None)
    with pytest.raises(SignatureRefused, match="only what a key"):
        strict.order(order(keys, "drain", "olga", trace="", proof=b""), None)
    assert gate(keys, unsigned=True).order(order(keys, "drain", "olga", trace="", proof=b""), None) is None
