"""Engines of one model beside each other: what they must have in common, and what they may differ in.

A model's queue is all its engines': whichever is free takes a trace, and another may run it again. So what a client
checked against one engine should hold for all. Sizes must agree: engines that differ in one do not serve the same
model. What else differs, as when engines of two versions serve side by side, is told, and a block must fit each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tracewire_bus.wire.messages import EngineInfo

__all__ = ["LEAVING", "differences", "disagreements"]

#: States of engines that take nothing new.
LEAVING: Final = frozenset(("draining", "lost"))

_MUST: Final = ("vocabulary", "hidden_size", "layer_count")
_SHARED: Final = {name: name for name in _MUST} | {
    "revision": "revision",
    "dtype": "dtype",
    "max_model_len": "longest sequence",
    "modules": "module tree",
    "taps": "taps",
    "loras": "LoRA adapters",
    "modalities": "modalities",
    "versions": "versions",
}


def disagreements(one: EngineInfo, other: EngineInfo) -> list[str]:
    """Why two engines do not serve the same model, `hidden_size 8, not 16` for each reason."""
    pairs = ((name, getattr(one, name), getattr(other, name)) for name in _MUST)
    return [f"{name} {mine}, not {theirs}" for name, mine, theirs in pairs if mine and theirs and mine != theirs]


def differences(engines: Sequence[EngineInfo]) -> list[str]:
    """What engines of one model do not have in common, in words: `revision`, `dtype`, `module tree`, ..."""
    first, *others = engines
    return [
        text for name, text in _SHARED.items() if any(getattr(other, name) != getattr(first, name) for other in others)
    ]
