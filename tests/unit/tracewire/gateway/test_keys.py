"""API keys: their file, their rights and tenants."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tracewire import TraceRejected
from tracewire.gateway.keys import EVERYBODY, RIGHTS, Caller, InvalidKeys, Keys, entry_of, new_key
from tracewire.gateway.problems import Problem

READ = frozenset({"read"})


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_key_is_known_by_its_hash_alone(tmp_path: Path) -> None:
    key, other = new_key(), new_key()
    assert key != other
    file = tmp_path / "keys.toml"
    file.write_text(entry_of(key, "alice", READ, "red") + entry_of(other, "bob", RIGHTS, ""))
    assert key not in file.read_text()
    keys = Keys(file)
    alice = keys.caller(f"Bearer {key}")
    assert (alice.name, alice.rights, alice.tenant) == ("alice", READ, "red")
    assert keys.caller(f"bearer {other}").name == "bob"
    for wrong in (None, "", key, f"Basic {key}", "Bearer ", "Bearer no", f"Bearer {key}x"):
        with pytest.raises(Problem) as caught:
            keys.caller(wrong)
        assert caught.value.status == 401
        assert caught.value.headers["WWW-Authenticate"] == "Bearer"


def test_a_gateway_without_keys_serves_everybody() -> None:
    assert Keys(None).caller(None) is EVERYBODY
    assert EVERYBODY.rights == RIGHTS


def test_the_file_is_read_again_when_it_has_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock, file, (one, two) = Clock(), tmp_path / "keys.toml", (new_key(), new_key())
    file.write_text(entry_of(one, "one", READ, ""))
    keys = Keys(file, age_s=1.0, clock=clock)
    file.write_text(entry_of(one, "one", READ, "") + entry_of(two, "two", READ, ""))
    with pytest.raises(Problem):
        keys.caller(f"Bearer {two}")
    clock.now = 1.5
    assert keys.caller(f"Bearer {two}").name == "two"
    # A file that cannot be used leaves the last keys in force, and is read again once it has been mended.
    with caplog.at_level(logging.ERROR):
        file.write_text("[[key")
        clock.now = 3.0
        assert keys.caller(f"Bearer {two}").name == "two"
    assert "the last ones stay in force" in caplog.text
    file.unlink()
    clock.now = 4.5
    assert keys.caller(f"Bearer {two}").name == "two"
    file.write_text(entry_of(two, "three", READ, ""))
    clock.now = 6.0
    assert keys.caller(f"Bearer {two}").name == "three"
    with pytest.raises(Problem):
        keys.caller(f"Bearer {one}")


HASH = "0" * 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "key"),
        ("[[key]]\nname = 'a'\n", "sha256"),
        (f"[[key]]\nname = 'a b'\nsha256 = '{HASH}'\n", "name: expected letters"),
        (f"[[key]]\nname = 'a'\ntenant = 'a:b'\nsha256 = '{HASH}'\n", "tenant: expected letters"),
        (f"[[key]]\nname = 'a'\nsha256 = '{HASH}'\nrights = ['write']\n", "'write' is none of"),
        (f"[[key]]\nname = 'a'\nsha256 = '{HASH}'\nright = []\n", "right"),
        (f"[[key]]\nname = 'a'\nsha256 = '{HASH}'\n" * 2, "two keys are called 'a'"),
        (f"[[key]]\nname = 'a'\nsha256 = '{HASH}'\n[[key]]\nname = 'b'\nsha256 = '{HASH}'\n", "the same key"),
        ("x = ", "Invalid value"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(InvalidKeys, match=message):
        Keys(file)


def test_a_tenant_is_a_prefix_of_its_traces() -> None:
    red, anybody = Caller("alice", tenant="red"), Caller("root")
    assert red.trace_id("mine") == "red:mine"
    assert red.trace_id("red:mine") == "red:mine"
    assert red.trace_id(None).startswith("red:")
    assert anybody.trace_id("blue:x") == "blue:x"
    with pytest.raises(TraceRejected, match="red:"):
        red.trace_id("blue:x")
    with pytest.raises(TraceRejected):
        red.trace_id("x" * 128)
    assert red.sees("red:mine")
    assert not any(map(red.sees, ("mine", "blue:mine", "redder:mine", "red")))
    assert anybody.sees("red:mine")


def test_a_right_that_a_key_lacks_is_named() -> None:
    reader = Caller("alice", rights=READ)
    reader.require("read")
    with pytest.raises(Problem, match="'steer'") as caught:
        reader.require("steer")
    assert caught.value.status == 403
