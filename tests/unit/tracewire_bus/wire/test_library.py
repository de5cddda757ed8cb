"""The digest of an entry of the library: of what decides its effect, and of nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tracewire_bus.wire.library import EntryArray, EntryMessage, entry_digest

ARRAY = EntryArray(dtype="float32", shape=[4], digest=b"0" * 16)
ENTRY = EntryMessage(name="calm", kind="vector", arrays={"vector": ARRAY}, model="tiny", at="residual(2)")


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "probe"},
        {"model": "other"},
        {"at": "residual(3)"},
        {"settings": {"activation": "relu"}},
        {"arrays": {"vector": EntryArray(dtype="float32", shape=[4], digest=b"1" * 16)}},
        {"arrays": {"vector.1": ARRAY}},
    ],
)
def test_another_effect_has_another_digest(change: dict[str, Any]) -> None:
    assert entry_digest(msgspec.structs.replace(ENTRY, **change)) != entry_digest(ENTRY)


def test_what_is_said_about_it_changes_nothing() -> None:
    said = msgspec.structs.replace(ENTRY, name="other", description="x", licence="MIT", effect={"a": 1}, by="me")
    assert entry_digest(said) == entry_digest(ENTRY)
    assert len(entry_digest(ENTRY)) == 32
