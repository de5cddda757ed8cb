"""`tracewire keys` makes, lists, rotates and revokes keys, which a running engine takes up."""

from __future__ import annotations

import fcntl
import json
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from tracewire.cli.main import main
from tracewire_bus.domain import identity
from tracewire_bus.domain.identity import Keyring, SignatureRefused, Signer
from tracewire_bus.wire.signing import unwrap


@pytest.fixture
def ring(tmp_path: Path) -> Path:
    return tmp_path / "keyring.json"


def accepted(ring: Keyring, file: Path) -> str:
    """The tenant whose key signs with this file."""
    envelope, content = unwrap(Signer.load(file).wrapped("submit", "tw", "m", "t", b"x"))
    assert envelope is not None
    return ring.verify(envelope, "submit", "tw", "m", "t", content).tenant


def test_a_key_is_made_listed_rotated_and_revoked(
    ring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = Keyring(ring)
    first, second = tmp_path / "a.key", tmp_path / "b.key"
    more = ["--tenant", "red", "--rights", "submit,code", "--quota", "traces=3", "--days", "30"]
    assert main(["keys", "new", "alice", "--keyring", str(ring), "--to", str(first), *more]) == 0
    said = capsys.readouterr()
    assert said.out.strip() == Signer.load(first).public
    assert str(first) in said.err
    assert accepted(engines, first) == "red"
    assert main(["keys", "rotate", "alice", "--keyring", str(ring), "--to", str(second), "--json"]) == 0
    new = json.loads(capsys.readouterr().out)
    assert (new["id"], new["rights"], new["quotas"]) == ("alice-2", ["submit", "code"], {"traces": 3})
    # Both hold for a while.
    assert accepted(engines, first) == accepted(engines, second) == "red"
    assert (engines.get("alice").valid_until or 0) < time.time() + 3601  # type: ignore[union-attr]
    assert main(["keys", "rotate", "alice-2", "--keyring", str(ring), "--to", str(tmp_path / "c.key")]) == 0
    assert engines.get("alice-3") is not None
    assert main(["keys", "revoke", "alice", "--keyring", str(ring)]) == 0
    with pytest.raises(SignatureRefused, match="was revoked"):
        accepted(engines, first)
    capsys.readouterr()
    assert main(["keys", "list", "--keyring", str(ring)]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [(row[0], row[3]) for row in rows] == [("alice", "revoked"), ("alice-2", "valid"), ("alice-3", "valid")]
    assert main(["keys", "list", "--keyring", str(ring), "--json"]) == 0
    assert "private" not in capsys.readouterr().out


def test_a_key_in_place_of_another_ends_when_that_one_was_to_end(ring: Path, tmp_path: Path) -> None:
    assert main(["keys", "new", "alice", "--keyring", str(ring), "--to", str(tmp_path / "a.key"), "--days", "30"]) == 0
    (old,) = Keyring(ring).listed()
    keys = Keyring(ring)
    keys.write([msgspec.structs.replace(old, valid_from=old.valid_until)])
    assert main(["keys", "rotate", "alice", "--keyring", str(ring), "--to", str(tmp_path / "b.key")]) == 0
    new = keys.get("alice-2")
    assert new is not None
    assert new.valid_from == new.valid_until == old.valid_until is not None
    assert (keys.get("alice").valid_until or 0) < time.time() + 3601  # type: ignore[union-attr]


@pytest.mark.parametrize("ended", ["valid_until", "revoked"])
def test_a_key_that_is_valid_no_longer_is_not_rotated(
    ended: str, ring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "new", "alice", "--keyring", str(ring), "--to", str(tmp_path / "a.key")]) == 0
    keys = Keyring(ring)
    keys.write([msgspec.structs.replace(key, **{ended: time.time() - 1}) for key in keys.listed()])
    before = ring.read_text()
    assert main(["keys", "rotate", "alice", "--keyring", str(ring), "--to", str(tmp_path / "b.key")]) == 1
    assert "has no valid key 'alice'" in capsys.readouterr().err
    assert ring.read_text() == before
    assert not (tmp_path / "b.key").exists()


def test_an_engine_s_key_is_in_no_keyring(ring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "e1", "--to", str(tmp_path / "e1.key"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tenant"] == "e1"
    assert not ring.exists()


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["new", "a", "--to", "KEY", "--rights", "fly"], 1, "unknown rights ['fly']"),
        (["new", "a", "--to", "KEY", "--quota", "cakes=1"], 2, "expected NAME=N with a name of traces, got 'cakes=1'"),
        (["new", "alice", "--to", "KEY", "--keyring", "RING"], 1, "has a key 'alice' already"),
        (["new", "a", "--to", "RING"], 1, "exists already"),
        (["revoke", "nobody", "--keyring", "RING"], 1, "has no key 'nobody'"),
        (["rotate", "nobody", "--keyring", "RING", "--to", "KEY"], 1, "has no valid key 'nobody'"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    arguments: list[str], status: int, says: str, ring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["keys", "new", "alice", "--keyring", str(ring), "--to", str(tmp_path / "alice.key")])
    before = ring.read_text()
    named = {"KEY": str(tmp_path / "new.key"), "RING": str(ring)}
    assert main(["keys", *(named.get(one, one) for one in arguments)]) == status
    assert says in capsys.readouterr().err
    assert ring.read_text() == before
    assert not (tmp_path / "new.key").exists()


@pytest.mark.parametrize("command", ["list", "revoke alice", "rotate alice --to KEY", "new alice --to KEY"])
def test_a_keyring_that_cannot_be_looked_at_is_refused_in_words(
    command: str, ring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ring.write_text("{}")
    file = tmp_path / "a.key"
    given = command.replace("KEY", str(file)).split()
    assert main(["keys", *given, "--keyring", str(ring / "below.json")]) == 1
    assert "Not a directory" in capsys.readouterr().err
    assert not file.exists()


def test_without_cryptography_a_key_is_refused_in_words(
    ring: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    assert main(["keys", "new", "alice", "--keyring", str(ring), "--to", str(tmp_path / "a.key")]) == 1
    assert "pip install 'tracewire[signing]'" in capsys.readouterr().err
    assert not (tmp_path / "a.key").exists()


@pytest.mark.parametrize(
    ("first", "second", "left"),
    [
        (["revoke", "alice"], ["revoke", "bob"], {"alice": True, "bob": True}),
        (["rotate", "alice", "--to", "A"], ["revoke", "bob"], {"alice": False, "alice-2": False, "bob": True}),
        (["new", "carol", "--to", "A"], ["new", "dave", "--to", "B"], dict.fromkeys(("carol", "dave"), False)),
        (["new", "carol", "--to", "A"], ["revoke", "bob"], {"carol": False, "bob": True}),
    ],
    ids=["revoke revoke", "rotate revoke", "new new", "new revoke"],
)
def test_commands_that_change_a_keyring_at_once_lose_nothing(
    first: list[str],
    second: list[str],
    left: dict[str, bool],
    ring: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second begins when the first has read the keyring, and is about to write it."""
    for id in ("alice", "bob"):
        assert main(["keys", "new", id, "--keyring", str(ring), "--to", str(tmp_path / f"{id}.key")]) == 0
    statuses: list[int] = []
    waits, write, flock = threading.Event(), identity._write, fcntl.flock

    def run(given: list[str]) -> None:
        named = [str(tmp_path / f"{one}.key") if one in ("A", "B") else one for one in given]
        statuses.append(main(["keys", *named, "--keyring", str(ring)]))

    def other() -> None:
        run(second)
        waits.set()

    def locks(*given: int) -> None:
        if threading.current_thread() is beside:
            waits.set()
        flock(*given)

    def writes(path: Path, *given: bytes) -> None:
        if path == ring and not beside.ident:
            beside.start()
            assert waits.wait(60)
        write(path, *given)  # type: ignore[arg-type]

    beside = threading.Thread(target=other)
    monkeypatch.setattr(identity, "_write", writes)
    monkeypatch.setattr(fcntl, "flock", locks)
    run(first)
    beside.join(60)
    assert statuses == [0, 0]
    found = {key.id: key.revoked is not None for key in Keyring(ring).listed()}
    assert {id: found.get(id) for id in left} == left
