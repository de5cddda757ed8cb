"""Vectors and numbers of the later kinds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.later_plans import autoencoder, vector
from tracewire_bus.wire.messages import Coordinates, Features, Hold, Lens, Probe, Project, SteerFeatures, StopWhen
from tracewire_engine.worker.declared.prepared import prepare, spanning_rows
from tracewire_engine.worker.declared.vector_cache import VectorCache


def bare() -> Any:
    """What is prepared, before it is."""
    sites = (("layers.1.output", True),)
    return SimpleNamespace(matrix=None, bias=None, numbers=(), autoencoder=None, choice=None, sites=sites)


def prepared(one: Any, *probes: Probe) -> Any:
    op = bare()
    op.key = prepare(op, one, VectorCache(torch.device("cpu")), {probe.name: probe for probe in probes})
    return op


def test_coordinates_add_up_to_the_projection() -> None:
    basis, value = vector(1, 3), vector(2)
    rows = prepared(Coordinates("c", "", basis)).matrix.numpy()
    inside = (rows @ value) @ basis
    orthonormal = spanning_rows(basis)
    np.testing.assert_allclose(inside, value @ orthonormal.T @ orthonormal, rtol=1e-4, atol=1e-4)
    # Directions that depend on each other span what fewer of them do.
    assert len(spanning_rows(np.stack([basis[0], 2 * basis[0], basis[1]]))) == 2
    assert prepared(Project("", basis, strength=0.5)).numbers == (0.5,)


def test_a_probe_with_a_sigmoid_is_held_by_its_logit() -> None:
    probe = Probe("p", "", vector(1, 2), bias=vector(3)[:2], activation="sigmoid")
    op = prepared(Hold("s", "", vector(2), "p", 0.75, -1.0, 2.0, output=1), probe)
    target, low, high, offset = op.numbers
    assert target == pytest.approx(np.log(3.0))
    assert (low, high, offset) == (-1.0, 2.0, float(vector(3)[1]))
    assert np.array_equal(op.bias.numpy()[0], vector(1, 2)[1])
    gain = prepared(Hold("s", "", vector(2), "p", 0.75, -1.0, 2.0, gain=0.5), probe)
    assert gain.numbers == (0.75, -1.0, 2.0, 0.5, 0.0)
    assert gain.key != op.key


def test_features_of_one_autoencoder_share_a_group() -> None:
    sae, parts = autoencoder("jumprelu"), VectorCache(torch.device("cpu"))
    sent = {"sae": sae.description, "weights": sae.packed}

    def key(one: Any) -> Any:
        return prepare(bare(), one, parts, {})

    assert key(Features("f", "", **sent)) == key(Features("g", "", threshold=2.0, **sent))
    assert key(Features("f", "", **sent)) != key(Features("g", "", top_k=3, **sent))
    # As many features are chosen as are read elsewhere.
    assert key(Features("f", "", top_k=2, **sent)) != key(Features("g", "", indices=[3, 4], **sent))
    # Of as many features.
    first, second = (SteerFeatures("", indices=[one, 2], add=1.0, **sent) for one in (0, 1))
    assert key(first) == key(second)


def test_a_stage_that_serves_no_location_has_no_autoencoder() -> None:
    sae, parts = autoencoder("relu"), VectorCache(torch.device("cpu"))
    one = Features("f", "", sae=sae.description, weights=sae.packed, indices=[1])
    parts.autoencoders.here = lambda location: location == "layers.7.output"
    op = bare()
    prepare(op, one, parts, {})
    assert (op.autoencoder, op.choice, op.matrix) == (None, None, None)
    op.sites = (*op.sites, ("layers.7.output", True))
    prepare(op, one, parts, {})
    assert op.autoencoder.one == sae.description
    assert op.matrix is op.choice.rows


def test_maps_of_other_requests_are_not_stacked() -> None:
    maps = [Lens("l", "", vector(seed, 16), vector(3)) for seed in (1, 1, 2)]
    parts = VectorCache(torch.device("cpu"))
    ops = [bare() for _ in maps]
    keys = [prepare(op, one, parts, {}) for op, one in zip(ops, maps, strict=True)]
    assert keys[0] == keys[1] != keys[2]
    assert ops[0].matrix.shape == (1, 16, 16)
    with pytest.raises(TypeError, match="knows no StopWhen"):
        prepared(StopWhen("p"))
