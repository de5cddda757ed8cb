"""Registers the provider. Inspect imports this module by the entry point `tracewire` of its group `inspect_ai`."""

from __future__ import annotations

from inspect_ai.model import ModelAPI, modelapi

__all__ = ["tracewire"]


@modelapi(name="tracewire")
def tracewire() -> type[ModelAPI]:
    """The class of the provider, which Inspect asks for when a model's name begins with `tracewire/`."""
    from .provider import TracewireAPI

    return TracewireAPI
