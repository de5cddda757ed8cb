"""The names of requests say which adapter they belong to."""

from __future__ import annotations

import pytest

from tracewire_engine.protocol.adapters import adapter_of, address_of, name_prefix


@pytest.mark.parametrize("adapter", [0, 1, 2, 10, 63])
def test_a_name_tells_its_adapter(adapter: int) -> None:
    assert adapter_of(f"{name_prefix(adapter)}17-8cb8007a") == adapter
    assert adapter_of(f"{name_prefix(adapter)}0") == adapter


@pytest.mark.parametrize("name", ["o1", "cmpl-a1t2", "", "a0t1", "at1", "a1", "a1tx", "a1000t1"])
def test_all_other_names_are_those_of_the_first(name: str) -> None:
    assert adapter_of(name) == 0


def test_each_adapter_has_an_address_of_its_own_below_the_first_ones_folder() -> None:
    first = "ipc:///run/x/link"
    assert [address_of(first, adapter) for adapter in (0, 1, 2)] == [
        first,
        "ipc:///run/x/adapter-1/link",
        "ipc:///run/x/adapter-2/link",
    ]
