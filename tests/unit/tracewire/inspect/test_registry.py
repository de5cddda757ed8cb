"""Inspect finds the provider by the entry point of the installed package."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import get_type_hints

from tracewire.inspect import registry
from tracewire.inspect.provider import TracewireAPI


def test_the_entry_point_names_the_module_that_registers_the_provider() -> None:
    (entry,) = entry_points(group="inspect_ai", name="tracewire")
    assert entry.load() is registry
    provider = registry.tracewire("demo", url="redis://localhost:1")
    assert isinstance(provider, TracewireAPI)
    assert get_type_hints(TracewireAPI.generate)
