"""The client's key comes from an argument or the environment; what is no key is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tracewire
from tests.support.identities import Identities
from tracewire.client_keys import KEY, check_engine_keys, signer_of


def test_a_key_is_found_by_the_argument_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)
    assert signer_of(None) is None
    keys = Identities(tmp_path)
    monkeypatch.setenv(KEY, str(keys.path("bob")))
    found, given = signer_of(None), signer_of(keys.path("alice"))
    assert found is not None
    assert given is not None
    assert (found.id, given.id) == ("bob", "alice")
    assert signer_of("") is None


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(tracewire.InvalidKey, match=r"key: .*none\.key: No such file"):
        tracewire.blocking.Client("redis://localhost", key=tmp_path / "none.key")


@pytest.mark.parametrize("keys", ["ab" * 32, ["ab"], ["AB" * 32], [b"ab" * 32], [3]])
def test_the_key_of_an_engine_is_64_digits(keys: Any) -> None:
    with pytest.raises(tracewire.InvalidKey, match="expected public keys of 64 hexadecimal digits, got"):
        check_engine_keys(keys)
    assert check_engine_keys(["ab" * 32]) == ("ab" * 32,)
