"""Each kind of declared intervention at one layer, in the size that `benchmarks/kinds.py` measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from tracewire import (
    Ablate,
    AttentionPattern,
    Clamp,
    Coordinates,
    Features,
    HeadAblate,
    HeadProbe,
    Hold,
    Lens,
    LogitLens,
    Model,
    Patch,
    Probe,
    Project,
    SparseAutoencoder,
    Steer,
    SteerFeatures,
    StopWhen,
    When,
)

__all__ = ["KINDS", "Kind", "Shape"]

#: Features of the autoencoder.
FEATURES: Final = 512


class Shape:
    """What interventions need to know of the model, and the arrays that they bring.

    Args:
        model: the client's handle of it.
        layer: where they are.
    """

    def __init__(self, model: Model, layer: int) -> None:
        self.width = model.info.hidden_size
        self.at, self.heads = f"residual({layer})", f"heads({layer})"
        self.head_size = model.tree.attention[layer].head_size if layer in model.tree.attention else 0
        self._random = np.random.default_rng(7)

    def rows(self, *shape: int) -> np.ndarray[Any, Any]:
        """Random vectors of a length of about 1."""
        return (self._random.standard_normal((*shape, self.width)) / self.width**0.5).astype(np.float32)

    @cached_property
    def vector(self) -> np.ndarray[Any, Any]:
        """A direction."""
        return self.rows()

    @cached_property
    def score(self) -> Probe:
        """A probe of the direction."""
        return Probe("score", self.at, self.vector)

    @cached_property
    def sae(self) -> SparseAutoencoder:
        """An autoencoder."""
        encoder, decoder = self.rows(2, FEATURES)
        threshold = np.full(FEATURES, 0.1, np.float32)
        return SparseAutoencoder(encoder, decoder, architecture="jumprelu", threshold=threshold)

    def steer(self, when: When | None = None) -> Steer:
        """The direction added, under a condition."""
        return Steer(self.at, self.vector, scale=0.1, when=when)


@dataclass(frozen=True)
class Kind:
    """Interventions of every request.

    Attributes:
        declared: makes them.
        saves: whether they save anything.
    """

    declared: Callable[[Shape], list[Any]]
    saves: bool = True


def _edit(make: Callable[[Shape], Any]) -> Kind:
    return Kind(lambda shape: [make(shape)], saves=False)


def _read(make: Callable[[Shape], Any]) -> Kind:
    return Kind(lambda shape: [make(shape)])


def _condition(**parts: Any) -> Kind:
    return _edit(lambda shape: shape.steer(When(**parts)))


#: Half of the first two thousand tokens, each a sequence of one.
_TOKENS: Final = [[token] for token in range(0, 2000, 2)]

#: By name. `Probe` and `Steer` are beside the others. What only edits saves nothing.
KINDS: Final[Mapping[str, Kind]] = {
    "Probe": _read(lambda shape: Probe("row", shape.at)),
    "Steer": _edit(Shape.steer),
    "Probe-weight": _read(lambda shape: shape.score),
    "norm": _read(lambda shape: Probe("norm", shape.at, reduce="norm")),
    "moments": _read(lambda shape: Probe("moments", shape.at, reduce="moments")),
    "Coordinates": _read(lambda shape: Coordinates("place", shape.at, shape.rows(3))),
    "LogitLens": _read(lambda shape: LogitLens("lens", shape.at, top_k=5)),
    "Lens": _read(lambda shape: Lens("lens", shape.at, shape.rows(shape.width), add=True, top_k=5)),
    "Features": _read(lambda shape: Features("top", shape.at, shape.sae, top_k=8)),
    "Features-chosen": _read(lambda shape: Features("chosen", shape.at, shape.sae, indices=[1, 5, 9])),
    "SteerFeatures": _edit(lambda shape: SteerFeatures(shape.at, shape.sae, [1, 5], scale=0.5, add=0.1)),
    "Clamp": _edit(lambda shape: Clamp(shape.at, shape.vector, max=0.25)),
    "Ablate": _edit(lambda shape: Ablate(shape.at, shape.vector, keep=0.5)),
    "Project": _edit(lambda shape: Project(shape.at, shape.rows(3), remove=True)),
    "Patch": _edit(lambda shape: Patch(shape.at, shape.vector, positions=3)),
    "Patch-generated": _edit(lambda shape: Patch(shape.at, shape.vector, positions="generated", strength=0.1)),
    "Hold": Kind(lambda shape: [shape.score, Hold("s", shape.at, shape.vector, "score", 1.0, -1.0, 1.0)]),
    "Hold-gain": Kind(
        lambda shape: [shape.score, Hold("s", shape.at, shape.vector, "score", 1.0, -1.0, 1.0, gain=0.1)]
    ),
    "StopWhen": Kind(lambda shape: [shape.score, StopWhen("score", above=1e9)]),
    "when-probe": Kind(
        lambda shape: [shape.score, shape.steer(When(probe="score", above=0.0, release=-0.5))],
    ),
    "when-tokens": _condition(tokens=_TOKENS),
    "when-every": _condition(start=2, every=3),
    "when-part": _condition(part="answer"),
    "when-read": _read(lambda shape: Probe("row", shape.at, when=When(tokens=_TOKENS))),
    "HeadProbe": _read(lambda shape: HeadProbe("heads", shape.heads, heads=[0, 1])),
    "HeadAblate": _edit(lambda shape: HeadAblate(shape.heads, [1], keep=0.5)),
    "Patch-heads": _edit(
        lambda shape: Patch(
            *(shape.heads, np.zeros((1, shape.head_size), np.float32)), heads=[1], positions="generated", strength=0.1
        )
    ),
    "AttentionPattern": _read(lambda shape: AttentionPattern("pattern", shape.heads, heads=[0, 1], top_k=8)),
}
