"""Lenses with maps of their own, and subspaces: `Lens`, `Coordinates` and `Project`."""

from __future__ import annotations

from typing import Any

from .declared_base import DeclaredIntervention, Live, Positions

__all__ = ["Coordinates", "Lens", "Project"]


class Lens(DeclaredIntervention, tag="lens"):
    """Applies a linear map of each location's own to the residual stream, then the model's final norm and head.

    The map makes of the stream `x` the stream `matrix @ x + bias`, in float32; with `add`, it adds this to `x`. So a
    tuned lens is its affine translators with `add`, and a Jacobian lens its matrices without. `matrix` has shape
    `[hidden, hidden]`, or `[locations, hidden, hidden]` with one matrix for each location of `at` in order; `bias` has
    shape `[hidden]` or `[locations, hidden]`. The items are those of a `LogitLens`.
    """

    name: str
    at: str
    matrix: Any
    bias: Any = None
    add: bool = False
    top_k: int = 5
    positions: Positions = "last"


class Coordinates(DeclaredIntervention, tag="coordinates"):
    """Reads the coordinates of the values in a subspace, and saves one item a step in the list `name`.

    `basis` (`[hidden]` or `[directions, hidden]`, of any norms and angles) spans the subspace. The coordinates,
    float32 `[directions]`, are those with which the directions add up to the value's projection on the subspace.
    Directions that depend on each other share theirs (the least squares solution of least norm). Positions and
    locations are further dimensions as in `Probe`.
    """

    name: str
    at: str
    basis: Any
    positions: Positions = "last"


class Project(DeclaredIntervention, tag="project"):
    """Projects the values on the subspace that `basis` (`[hidden]` or `[directions, hidden]`) spans.

    With `remove`, it takes the projection out of the values instead, and keeps the rest. `strength` is how far the old
    value goes to the new one: 1 replaces it, 0 leaves it.
    """

    at: str
    basis: Any
    remove: bool = False
    strength: float | Live = 1.0
    positions: Positions = "all"
