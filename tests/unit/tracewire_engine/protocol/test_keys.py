"""Names that the adapter and the workers agree on."""

from __future__ import annotations

from pathlib import Path

from tracewire_engine.protocol import keys


def test_no_two_keys_are_the_same() -> None:
    names = [value for name, value in vars(keys).items() if name.isupper()]
    assert len(names) > 10
    assert len(set(names)) == len(names)


def test_large_variables_lie_beside_the_link() -> None:
    assert keys.inputs_folder("ipc:///run/engine/link") == Path("/run/engine")
