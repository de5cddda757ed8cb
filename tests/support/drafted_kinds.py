"""Declared interventions of each kind that is drafted, for a number: other numbers have other vectors and strengths.

The edits are small, so that the demo model goes on with texts that repeat themselves.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tracewire import (
    Ablate,
    Clamp,
    Coordinates,
    Features,
    HeadAblate,
    HeadProbe,
    Lens,
    LogitLens,
    Patch,
    Probe,
    Project,
    SparseAutoencoder,
    Steer,
    SteerFeatures,
    StopWhen,
    When,
)

__all__ = ["DRAFTED", "of_number"]

WIDTH, SIZE, FEATURES = 256, 64, 48
_rng = np.random.default_rng(23)
MATRIX = (np.eye(WIDTH) + _rng.standard_normal((WIDTH, WIDTH)) / 64).astype(np.float32)
ENCODER, DECODER = (_rng.standard_normal((2, FEATURES, WIDTH)) / 16).astype(np.float32)
SAE = SparseAutoencoder(
    ENCODER, DECODER, ENCODER[:, 0].copy(), architecture="jumprelu", threshold=np.full(48, 0.1, "f4")
)
#: Read behind each edit: of all positions, so that a prompt has several rows and a token one.
AFTER = Probe("after", "residual(7)", positions="all")


def _vectors(number: int) -> np.ndarray:
    """Three vectors; five numbers share them."""
    return (np.random.default_rng(number % 5).standard_normal((3, WIDTH)) / 16).astype(np.float32)


def _strength(number: int) -> float:
    return 0.25 + number % 3 / 4


def _reads(number: int) -> list[Any]:
    vectors = _vectors(number)
    return [
        Probe("raw", "residual(1)"),
        Probe("linear", "residual(6)", vectors, bias=vectors[:, 0], activation="softmax"),
        Probe("one", "residual(*)", vectors[0], activation="sigmoid"),
        Probe("norm", "model.layers.2.mlp", reduce="norm"),
        Probe("moments", "residual(3)", reduce="moments", positions="generated"),
        Probe("mean", "residual(3)", vectors[0], reduce="mean", positions="all"),
        Probe("prompt", "residual(3)", vectors[0], positions="prompt"),
    ]


def _between(edit: Any, prefix: str = "") -> list[Any]:
    """An edit between reads at its location, whose names begin with a prefix."""
    return [
        Probe(f"{prefix}before", edit.at, reduce="max"),
        edit,
        Probe(f"{prefix}behind", edit.at),
        Probe(f"{prefix}after", "residual(7)", positions="all"),
    ]


def _near(edit: Any) -> list[Any]:
    """An edit by sums of products, which a batch of other rows rounds otherwise: so does what comes behind it."""
    return _between(edit, "near_")


def _when(number: int, when: When) -> list[Any]:
    """A read and an edit under a condition."""
    vector = _vectors(number)[0]
    return [
        Steer("residual(3)", vector, scale=_strength(number), when=when),
        Probe("seen", "residual(5)", vector, when=when),
        LogitLens("lens", "residual(6)", top_k=2, when=when),
        AFTER,
    ]


#: By name, what a number's trace declares.
DRAFTED: dict[str, Callable[[int], list[Any]]] = {
    "probes": _reads,
    "logit lenses": lambda number: [
        LogitLens("lens", "residual(*)", top_k=3),
        LogitLens("all", "residual(5)", top_k=1, positions="all"),
    ],
    "lenses": lambda number: [
        Lens("tuned", "residual(2)", MATRIX, _vectors(number)[0], add=bool(number % 2), top_k=2),
    ],
    "coordinates": lambda number: [Coordinates("coordinates", "residual(*)", _vectors(number))],
    "features": lambda number: [
        Features("top", "residual(2)", SAE, top_k=3),
        Features("picked", "residual(4)", SAE, indices=[1, 7, 8 + number % 5], positions="all"),
    ],
    "heads": lambda number: [
        HeadProbe("heads", "heads(1)"),
        HeadProbe("norms", "heads(*)", heads=[3, 1], reduce="norm", positions="generated"),
    ],
    "steer": lambda number: _between(Steer("residual(4)", _vectors(number)[0], scale=_strength(number))),
    "steer generated": lambda number: [
        *_between(Steer("residual(2)", _vectors(number)[1], scale=2.0, positions="generated")),
        Steer("residual(5)", _vectors(number)[2], scale=-_strength(number), positions="last"),
    ],
    "clamp": lambda number: _near(Clamp("residual(4)", _vectors(number)[0], min=-0.5, max=_strength(number))),
    "ablate": lambda number: _near(Ablate("residual(4)", _vectors(number)[0], keep=0.5)),
    "ablate a subspace": lambda number: _near(Ablate("residual(4)", _vectors(number), keep=_strength(number))),
    "ablate a module": lambda number: _between(Ablate("model.layers.5.mlp", keep=1.25 - _strength(number) / 2)),
    "project": lambda number: _near(Project("residual(3)", _vectors(number), remove=True)),
    "project partly": lambda number: _near(Project("residual(6)", _vectors(number), strength=0.05)),
    "steer features": lambda number: _near(SteerFeatures("residual(2)", SAE, [1, 7], scale=0.5, add=_strength(number))),
    "ablate heads": lambda number: [
        HeadAblate("heads(2)", [3, 1], keep=_strength(number), mean=_vectors(number)[0, :SIZE]),
        AFTER,
    ],
    "patch a prompt": lambda number: [
        Patch("residual(2)", _vectors(number)[:2] * 8, positions=[0, 1], strength=0.5),
        AFTER,
    ],
    "patch what is generated": lambda number: [
        Patch("residual(2)", _vectors(number)[0], positions="generated", strength=0.05),
        Patch("heads(3)", _vectors(number)[:1, :SIZE], heads=[2], positions="all", strength=0.5),
        AFTER,
    ],
    "stop": lambda number: [
        Probe("score", "residual(5)", _vectors(number)[0]),
        StopWhen("score", above=0.1 * (number % 4), steps=2),
    ],
    "under indices": lambda number: _when(number, When(start=2 + number % 3, stop=17, every=1 + number % 4)),
    "under ids": lambda number: _when(number, When(text=("(", ":", " ", "import")[number % 4])),
    "under a pair of ids": lambda number: _when(number, When(tokens=[[9, 10], [266, 14]])),
    "in the answer": lambda number: _when(number, When(part="answer")),
    "in the prompt": lambda number: _when(number, When(part="prompt")),
}


def of_number(number: int) -> list[Any]:
    """What the trace of this number declares: the kinds in turn."""
    return list(DRAFTED.values())[number % len(DRAFTED)](number)
