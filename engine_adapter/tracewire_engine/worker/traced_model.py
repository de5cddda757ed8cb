"""The `model` of a block."""

from __future__ import annotations

from typing import Any

from nnsight.modeling.vllm.vllm import VLLM

from tracewire_engine.worker.blocks.residual import Residual

__all__ = ["TracedModel"]


class TracedModel(VLLM):
    """nnsight's envoy of vLLM's model, with `residual(i)` in addition."""

    def residual(self, index: int) -> Residual:
        """The residual stream after decoder layer `index` (negative counts from the last).

        Raises:
            IndexError: no such layer.
            ValueError: `find_layers` found no list of decoder layers in the model.
        """
        path: str = self.__dict__["_tracewire_layers"]
        if not path:
            raise ValueError("this model has no list of decoder layers for residual(i) to index")
        layers: Any = self
        for name in path.split("."):
            layers = getattr(layers, name)
        count = len(layers)
        if not -count <= index < count:
            raise IndexError(f"residual({index}): {path} has {count} layers, 0 to {count - 1}")
        return Residual(layers[index % count], index % count, self.__dict__["_tracewire_sums"])
