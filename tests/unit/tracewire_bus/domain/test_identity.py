"""Keys sign, and a keyring verifies: who may do what, and since when no longer."""

from __future__ import annotations

import fcntl
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.identities import Identities
from tracewire_bus.domain import identity
from tracewire_bus.domain.identity import (
    Key,
    KeyFileError,
    Keyring,
    SignatureRefused,
    Signer,
    acting_for,
    new_key,
    signed,
    verify_final,
)
from tracewire_bus.wire.codec import decode_event, encode
from tracewire_bus.wire.messages import Final
from tracewire_bus.wire.signing import MOST_AT_ONCE, Envelope, Kind, joint_digests, joint_text, unwrap


@pytest.fixture
def keys(tmp_path: Path) -> Identities:
    return Identities(tmp_path)


def alone(keys: Identities, id: str = "alice") -> Envelope:
    envelope, _ = unwrap(keys.signer(id).wrapped("submit", "tw", "m", "t", b"content"))
    assert envelope is not None
    return envelope


def verify(keys: Identities, envelope: Envelope, *, ring: Keyring | None = None, **more: Any) -> Key:
    return (ring or keys.ring).verify(envelope, *("submit", "tw", "m", "t", b"content"), **more)


def test_a_signature_is_of_its_key(keys: Identities) -> None:
    key = verify(keys, alone(keys))
    assert (key.id, key.tenant, key.may("code"), key.may("operate")) == ("alice", "red", True, False)
    key.demand("code")
    with pytest.raises(SignatureRefused, match="key 'alice' of tenant 'red' has no right 'operate'"):
        key.demand("operate")


@pytest.mark.parametrize("changed", [("edit", "tw", "m", "t", b"content"), ("submit", "tw", "m", "u", b"content")])
def test_one_of_something_else_is_refused(keys: Identities, changed: Any) -> None:
    with pytest.raises(SignatureRefused, match="is of another trace"):
        keys.ring.verify(alone(keys), *changed)


def test_a_forged_one_is_refused(keys: Identities) -> None:
    ours = alone(keys)
    for forged in (
        msgspec.structs.replace(ours, key="bob"),
        msgspec.structs.replace(ours, expires=ours.expires + 1),
        msgspec.structs.replace(ours, nonce=b"x" * 16),
        msgspec.structs.replace(ours, signature=bytes(64)),
        msgspec.structs.replace(ours, signature=b""),
        msgspec.structs.replace(ours, tenant="blue"),
    ):
        with pytest.raises(SignatureRefused, match="the signature is not of key"):
            verify(keys, forged)
    with pytest.raises(SignatureRefused, match="no key 'nobody' is known here"):
        verify(keys, msgspec.structs.replace(ours, key="nobody"))


def together(keys: Identities, traces: list[str], kind: Kind = "submit") -> dict[str, Envelope]:
    """What alice signs at once for these traces."""
    signer = keys.signer("alice")
    bare, texts = zip(*(signer.unsigned(kind, "tw", "m", trace, b"content") for trace in traces), strict=True)
    found = signer.sign(texts)
    return {trace: signed(one, *found) for trace, one in zip(traces, bare, strict=True)}


def test_a_signature_of_several_is_of_each_and_of_nothing_else(keys: Identities) -> None:
    first, second = together(keys, ["t", "u"]), together(keys, ["t", "v"])
    ours = first["t"]
    # Each is verified as the first that comes, and again as one whose signature is remembered.
    for _ in range(2):
        assert verify(keys, ours).id == "alice"
        foreign = joint_digests([b"another text"])
        for why, wrong in {
            "moved into another burst": {"signature": second["t"].signature, "digests": second["t"].digests},
            "with another burst's digests": {"digests": second["t"].digests},
            "with another burst's signature": {"signature": second["t"].signature},
            "with a digest more": {"digests": ours.digests + foreign},
            "with a digest less": {"digests": ours.digests[:32]},
            "with the digests in another order": {"digests": ours.digests[32:] + ours.digests[:32]},
            "with a digest cut": {"digests": ours.digests[:-1]},
            "with more digests than may be": {"digests": ours.digests + foreign * (MOST_AT_ONCE - 1)},
            "as one of its own": {"digests": b""},
            "under another nonce": {"nonce": first["u"].nonce},
            "valid for longer": {"expires": ours.expires + 1},
            "by another key": {"key": "bob"},
            "for another tenant": {"tenant": "blue"},
        }.items():
            with pytest.raises(SignatureRefused, match="the signature is not of key"):
                verify(keys, msgspec.structs.replace(ours, **wrong))
                pytest.fail(why)
        for other in (
            ("edit", "tw", "m", "t", b"content"),
            ("submit", "tx", "m", "t", b"content"),
            ("submit", "tw", "n", "t", b"content"),
            ("submit", "tw", "m", "u", b"content"),
            ("submit", "tw", "m", "t", b"contents"),
        ):
            with pytest.raises(SignatureRefused, match="the signature is not of key 'alice'"):
                keys.ring.verify(ours, *other)  # type: ignore[arg-type]


def test_one_that_several_digests_cover_is_no_signature_of_its_own(keys: Identities) -> None:
    """Nor can what a signature of several covers be passed off as a message."""
    ours = together(keys, ["t", "u"])["t"]
    forged = msgspec.structs.replace(ours, digests=joint_digests([joint_text(ours.digests)]))
    with pytest.raises(SignatureRefused, match="the signature is not of key 'alice'"):
        verify(keys, forged)


def test_a_key_that_is_revoked_loses_what_was_verified_before(keys: Identities) -> None:
    both = together(keys, ["t", "u"])
    verify(keys, both["t"])
    known = keys.ring.listed()
    keys.ring.write([msgspec.structs.replace(key, revoked=1.0) if key.id == "alice" else key for key in known])
    with pytest.raises(SignatureRefused, match="key 'alice' was revoked"):
        keys.ring.verify(both["u"], "submit", "tw", "m", "u", b"content")


def test_a_signature_of_several_is_verified_once_and_few_are_remembered(
    keys: Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[bytes] = []
    is_of = identity._is_of
    monkeypatch.setattr(identity, "_is_of", lambda *given: checks.append(given[1]) or is_of(*given))
    monkeypatch.setattr(identity, "_verified", {})
    monkeypatch.setattr(identity, "_REMEMBERED", 2)
    bursts = [together(keys, ["t", "u", "v"]) for _ in range(4)]
    for burst in bursts:
        for trace, envelope in burst.items():
            keys.ring.verify(envelope, "submit", "tw", "m", trace, b"content")
        assert len(identity._verified) <= 2
    assert checks == [burst["t"].signature for burst in bursts]


def test_a_signature_expires_by_the_time_at_which_it_came(keys: Identities) -> None:
    ours = alone(keys)
    later = ours.expires + 3600
    with pytest.raises(SignatureRefused, match="had expired 3600 s before"):
        verify(keys, ours, at=later)
    assert verify(keys, ours, at=later, timely=False).id == "alice"


def test_one_that_is_valid_for_ever_is_refused(keys: Identities, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracewire_bus.domain.identity._LIFETIMES", {"submit": 10**9})
    with pytest.raises(SignatureRefused, match="valid for more than"):
        verify(keys, alone(keys))


def test_the_keyring_is_read_again_when_it_changes(keys: Identities) -> None:
    ring = Keyring(keys.ring.path)
    ours = alone(keys)
    verify(keys, ours, ring=ring)
    changed = {key.id: key for key in keys.ring.listed()}
    for field, value, says in (
        ("revoked", time.time(), "was revoked"),
        ("valid_until", time.time() - 1, "not valid at this time"),
        ("valid_from", time.time() + 60, "not valid at this time"),
    ):
        one = msgspec.structs.replace(changed["alice"], **{field: value})
        keys.ring.write([*(key for key in changed.values() if key.id != "alice"), one])
        with pytest.raises(SignatureRefused, match=says):
            verify(keys, ours, ring=ring)
    keys.ring.write(list(changed.values()))
    verify(keys, ours, ring=ring)


def test_what_is_stored_is_judged_by_its_key_at_its_time(keys: Identities) -> None:
    ours, now = alone(keys), time.time()
    what: Any = ("submit", "tw", "m", "t", b"content")
    others = [key for key in keys.ring.listed() if key.id != "alice"]
    alice = keys.ring.get("alice")
    assert alice is not None
    keys.ring.write([*others, msgspec.structs.replace(alice, valid_from=now - 100, valid_until=now - 50)])
    for at in (now - 100, now - 75, now - 50):
        assert keys.ring.verify_stored(ours, *what, at=at).id == "alice"
    for at in (now - 101, now - 49, now):
        with pytest.raises(SignatureRefused, match="key 'alice' was not valid when this came"):
            keys.ring.verify_stored(ours, *what, at=at)
    with pytest.raises(SignatureRefused, match="is not valid at this time"):
        verify(keys, ours, at=now - 75)
    keys.ring.write([*others, alice])
    with pytest.raises(SignatureRefused, match="had expired 3600 s before"):
        keys.ring.verify_stored(ours, *what, at=ours.expires + 3600)
    with pytest.raises(SignatureRefused, match="the signature is not of key"):
        keys.ring.verify_stored(ours, *what[:-1], b"contents", at=now)
    keys.ring.write([*others, msgspec.structs.replace(alice, revoked=now)])
    with pytest.raises(SignatureRefused, match="key 'alice' was revoked"):
        keys.ring.verify_stored(ours, *what, at=now - 75)


def test_a_keyring_that_cannot_be_read_accepts_nobody_and_says_so(keys: Identities) -> None:
    ring, told = Keyring(keys.ring.path), []
    ring.on_error = told.append
    verify(keys, alone(keys), ring=ring)
    keys.ring.path.write_text("{")
    with pytest.raises(SignatureRefused, match="no key 'alice' is known here"):
        verify(keys, alone(keys), ring=ring)
    assert len(told) == 1
    keys.ring.path.unlink()
    with pytest.raises(SignatureRefused, match="no key"):
        verify(keys, alone(keys), ring=ring)


def test_a_keyring_that_cannot_be_looked_at_is_named(keys: Identities) -> None:
    ring, told = Keyring(keys.ring.path / "below.json"), list[KeyFileError]()
    ring.on_error = told.append
    with pytest.raises(KeyFileError, match=r"keyring\.json/below\.json: Not a directory"):
        ring.listed()
    assert ring.get("alice") is None
    assert [str(error) for error in told] == [f"{ring.path}: Not a directory"]


def test_a_key_acts_for_others_if_it_may(keys: Identities) -> None:
    token = acting_for.set("green")
    try:
        assert verify(keys, alone(keys, "door")).tenant == "green"
        with pytest.raises(SignatureRefused, match="key 'alice' of tenant 'red' has no right 'delegate'"):
            verify(keys, alone(keys))
    finally:
        acting_for.reset(token)
    assert verify(keys, alone(keys, "door")).tenant == "ops"


def test_the_private_key_is_its_user_s_alone(keys: Identities) -> None:
    assert keys.path("alice").stat().st_mode & 0o777 == 0o600
    private = keys.path("alice").read_text()
    assert keys.signer("alice").public not in private
    with pytest.raises(KeyFileError, match="exists already"):
        new_key(keys.path("alice"), "alice", "red", [])
    assert repr(keys.signer("alice")) == "<Signer alice>"


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("id", "", "1 to 64 printable characters, got ''"),
        ("id", "a\n", "1 to 64 printable"),
        ("tenant", "x" * 65, "expected a tenant"),
        ("rights", ["submit", "fly"], r"unknown rights \['fly'\]"),
        ("quotas", {"cakes": 1}, r"unknown quotas \['cakes'\]"),
        ("public", "ab", "64 hexadecimal digits"),
    ],
)
def test_what_is_no_key_is_named(keys: Identities, field: str, value: Any, says: str) -> None:
    bad = msgspec.structs.replace(keys.ring.listed()[0], **{field: value})
    with pytest.raises(KeyFileError, match=says):
        keys.ring.write([bad])
    raw = msgspec.json.decode(keys.ring.path.read_bytes())
    raw["keys"][0][field] = value
    keys.ring.path.write_bytes(msgspec.json.encode(raw))
    with pytest.raises(KeyFileError, match=says):
        Keyring(keys.ring.path).listed()


def test_two_keys_of_one_id_are_refused(keys: Identities) -> None:
    one = keys.ring.listed()[0]
    with pytest.raises(KeyFileError, match="has a key 'alice' already"):
        keys.ring.add(one)
    keys.ring.write([one, one])
    with pytest.raises(KeyFileError, match="two keys have one id"):
        Keyring(keys.ring.path).listed()


def test_a_key_is_added_to_what_others_have_written_meanwhile(
    keys: Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes when the first has read the keyring, and waits until the first has written it."""
    one = keys.ring.listed()[0]
    waits, write, flock = threading.Event(), identity._write, fcntl.flock

    def add() -> None:
        Keyring(keys.ring.path).add(msgspec.structs.replace(one, id="second"))
        waits.set()

    def locks(*given: int) -> None:
        if threading.current_thread() is beside:
            waits.set()
        flock(*given)

    def writes(*given: Any) -> None:
        if not beside.ident:
            beside.start()
            assert waits.wait(60)
        write(*given)

    beside = threading.Thread(target=add)
    monkeypatch.setattr(identity, "_write", writes)
    monkeypatch.setattr(fcntl, "flock", locks)
    Keyring(keys.ring.path).add(msgspec.structs.replace(one, id="first"))
    beside.join(60)
    assert {"first", "second"} <= {key.id for key in Keyring(keys.ring.path).listed()}


def test_a_keyring_that_cannot_be_locked_is_named(keys: Identities, tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"none/\.ring\.json\.lock: No such file"):
        Keyring(tmp_path / "none" / "ring.json").add(keys.ring.listed()[0])


def test_a_key_file_s_error_shows_nothing_of_the_key(keys: Identities, tmp_path: Path) -> None:
    file = keys.path("alice")
    content = msgspec.json.decode(file.read_bytes())
    file.write_bytes(msgspec.json.encode({**content, "private": content["private"][:-1]}))
    with pytest.raises(KeyFileError, match="is no key file") as refused:
        Signer.load(file)
    assert content["private"][:8] not in str(refused.value)
    with pytest.raises(KeyFileError, match=r"none\.key: No such file"):
        Signer.load(tmp_path / "none.key")


@pytest.mark.parametrize("count", [1, 2, MOST_AT_ONCE + 1])
def test_a_final_is_of_its_engine_and_trace(keys: Identities, count: int) -> None:
    engine = keys.signer("engine")
    finals = [(f"t{number}", encode(Final(attempt=1, seq=number, status="finished"))) for number in range(count)]
    trusted = [keys.signer("alice").public, engine.public]
    signatures = set()
    for (trace, _), data in zip(finals, engine.sign_finals("tw", finals), strict=True):
        found = decode_event(data)
        assert isinstance(found, Final)
        signatures.add(found.signature)
        assert verify_final(trusted, "tw", trace, data, found.signature)
        assert not verify_final(trusted, "tw", "u", data, found.signature)
        assert not verify_final(trusted, "tx", trace, data, found.signature)
        assert not verify_final(trusted[:1], "tw", trace, data, found.signature)
        assert not verify_final(trusted, "tw", trace, data.replace(b"finished", b"failured"), found.signature)
        for wrong in (b"", found.signature[:64], found.signature + bytes(32), found.signature[:-1], bytes(64)):
            if wrong != found.signature:
                assert not verify_final(trusted, "tw", trace, data, wrong), wrong
    assert len(signatures) == -(-count // MOST_AT_ONCE)
