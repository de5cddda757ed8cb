"""Compares the engines that serve one model.

Any free engine of a model takes the next trace from the model's queue, and another may run the trace again. A client's
checks against one engine should therefore hold for all. Engines whose sizes differ do not serve the same model, and the
second refuses to start (`disagreements`). Other properties may differ, for example while two versions run side by side;
they are reported, and a block must fit every engine (`differences`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tracewire_bus.wire.messages import EngineInfo

__all__ = ["LEAVING_STATES", "differences", "disagreements"]

#: States (`EngineInfo.state`) of engines that take no new traces.
LEAVING_STATES: Final = frozenset(("draining", "lost"))

_MUST_AGREE: Final = ("vocabulary", "hidden_size", "layer_count")
_COMPARED: Final = {name: name for name in _MUST_AGREE} | {
    "revision": "revision",
    "dtype": "dtype",
    "max_model_len": "longest sequence",
    "modules": "module tree",
    "taps": "taps",
    "loras": "LoRA adapters",
    "modalities": "modalities",
    "code": "code that they run",
    "versions": "versions",
}


def disagreements(one: EngineInfo, other: EngineInfo) -> list[str]:
    """The sizes in which two engines differ, each as `hidden_size 8, not 16`; empty if both can serve one model."""
    pairs = ((name, getattr(one, name), getattr(other, name)) for name in _MUST_AGREE)
    return [f"{name} {mine}, not {theirs}" for name, mine, theirs in pairs if mine and theirs and mine != theirs]


def differences(engines: Sequence[EngineInfo]) -> list[str]:
    """The properties in which engines of one model differ: `revision`, `dtype`, `module tree`, ..."""
    first, *others = engines
    return [
        text
        for name, text in _COMPARED.items()
        if any(getattr(other, name) != getattr(first, name) for other in others)
    ]
