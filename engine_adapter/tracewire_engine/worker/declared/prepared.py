"""What a worker needs of each intervention of the later kinds: vectors on its device, and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from tracewire_bus.wire.messages import Coordinates, Declared, Features, Hold, Lens, Probe, Project, SteerFeatures

from .device_autoencoder import Choice, DeviceAutoencoder
from .vector_cache import VectorCache

__all__ = ["prepare", "spanning_rows"]


class Prepared(Protocol):
    """What an intervention has on the device: an `Op`."""

    matrix: torch.Tensor | None
    bias: torch.Tensor | None
    numbers: tuple[float, ...]
    autoencoder: DeviceAutoencoder | None
    choice: Choice | None
    sites: tuple[tuple[str, bool], ...]


def spanning_rows(directions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Orthonormal rows that span the given ones."""
    rows = np.atleast_2d(directions).astype(np.float64)
    _, sizes, spanning = np.linalg.svd(rows, full_matrices=False)
    spanned: np.ndarray[Any, Any] = spanning[sizes > sizes.max(initial=0.0) * 1e-6]
    return spanned


def _coordinates(directions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The rows whose products with a value are its coordinates in the given directions."""
    rows: np.ndarray[Any, Any] = np.linalg.pinv(np.atleast_2d(directions).astype(np.float64).T, rcond=1e-6)
    return rows


def prepare(op: Prepared, one: Declared, vectors: VectorCache, probes: Mapping[str, Probe]) -> tuple[Any, ...]:
    """Fill `op` for an intervention. Returns what the interventions of a group have in common.

    Raises:
        TypeError: no worker knows the kind.
        OSError: an array's file is not there.
        AutoencodersFull: an autoencoder does not fit beside those in use.
    """
    if isinstance(one, Lens):
        op.matrix = vectors.get("map", one.matrix, lambda matrix: matrix if matrix.ndim == 3 else matrix[None])
        if one.bias is not None:
            op.bias = vectors.get("offset", one.bias, np.atleast_2d)
        # Maps are large: those of several requests are not stacked.
        return one.top_k, one.add, id(op.matrix), id(op.bias)
    if isinstance(one, Coordinates):
        op.matrix = vectors.get("coordinates", one.basis, _coordinates)
        return (op.matrix.shape,)
    if isinstance(one, Project):
        op.matrix = vectors.get("basis", one.basis, spanning_rows)
        op.numbers = (_number(one.strength),)
        return op.matrix.shape, one.remove
    if isinstance(one, Features):
        return _features(op, one, vectors)
    if isinstance(one, SteerFeatures):
        _prepare_features(op, one, vectors)
        low, high = one.min, one.max
        op.numbers = (
            _number(one.add),
            _number(one.scale),
            -float("inf") if low is None else _number(low),
            float("inf") if high is None else _number(high),
        )
        return len(one.indices), id(op.autoencoder)
    if isinstance(one, Hold):
        return _hold(op, one, vectors, probes)
    raise TypeError(f"this engine knows no {type(one).__name__}")


def _number(value: Any) -> float:
    return float(value)


def _features(op: Prepared, one: Features, vectors: VectorCache) -> tuple[Any, ...]:
    _prepare_features(op, one, vectors)
    if one.indices is not None:
        return "chosen", len(one.indices), id(op.autoencoder)
    op.numbers = (0.0 if one.threshold is None else max(0.0, _number(one.threshold)),)
    return "greatest", one.top_k, id(op.autoencoder)


def _prepare_features(op: Prepared, one: Features | SteerFeatures, vectors: VectorCache) -> None:
    """Get the autoencoder and the rows of chosen features, unless another pipeline stage serves all locations."""
    store = vectors.autoencoders
    if not any(store.here(location) for location, _ in op.sites):
        return
    op.autoencoder = store.get(one.sae, one.weights, vectors.read)
    if one.indices is not None:
        op.choice = op.autoencoder.chosen(one.indices)
        op.matrix, op.bias = op.choice.rows, op.choice.vectors


def _hold(op: Prepared, one: Hold, vectors: VectorCache, probes: Mapping[str, Probe]) -> tuple[Any, ...]:
    probe = probes[one.probe]
    op.matrix = vectors.get("rows", one.vector, np.atleast_2d)
    low, high, target = _number(one.min), _number(one.max), _number(one.target)
    if one.gain is not None:
        op.numbers = (target, low, max(low, high), _number(one.gain), _number(one.proportional))
        return ("gain", op.matrix.shape)
    op.bias = vectors.get(f"row {one.output}", probe.weight, lambda weight: np.atleast_2d(weight)[[one.output]])
    offset = 0.0
    if probe.bias is not None:
        given = np.atleast_1d(vectors.read(probe.bias)).astype(np.float32)
        offset = float(given[one.output if len(given) > 1 else 0])
    if probe.activation == "sigmoid":
        inside = min(max(target, 1e-6), 1 - 1e-6)
        target = float(torch.logit(torch.tensor(inside, dtype=torch.float64)))
    op.numbers = (target, low, max(low, high), offset)
    return ("exact", op.matrix.shape)
