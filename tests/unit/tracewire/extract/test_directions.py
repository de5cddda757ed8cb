"""Directions between two kinds of activations that are known, and their scores."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from tracewire.extract.directions import METHODS, Method, cross_validated, found

RANDOM = np.random.default_rng(0)
AXIS = RANDOM.standard_normal(32)
AXIS /= np.linalg.norm(AXIS)


def kinds(distance: float, count: int = 40, noise: float = 1.0) -> tuple[Any, Any]:
    """Activations of two kinds whose means lie this far apart along `AXIS`, about one that is not 0."""
    base = 5.0 + RANDOM.standard_normal((count, 32)) * noise
    other = 5.0 + RANDOM.standard_normal((count, 32)) * noise
    return (base + distance / 2 * AXIS).astype(np.float32), (other - distance / 2 * AXIS).astype(np.float32)


@pytest.mark.parametrize("method", METHODS)
def test_each_method_finds_the_axis(method: Method) -> None:
    positive, negative = kinds(12.0)
    one = found(positive, negative, method)
    assert one.vector.dtype == np.float32
    assert np.linalg.norm(one.vector) == pytest.approx(1)
    assert one.vector @ AXIS > (0.8 if method == "logistic" else 0.97)
    assert one.distance == pytest.approx(12, rel=0.2)
    assert ((positive @ one.vector > one.threshold) & (negative @ one.vector < one.threshold)).all()
    assert ((positive @ one.weight + one.bias > 0) & (negative @ one.weight + one.bias < 0)).all()


def test_a_difference_of_means_is_that() -> None:
    positive, negative = kinds(3.0)
    one = found(positive, negative, "difference_of_means")
    difference = positive.astype(float).mean(0) - negative.astype(float).mean(0)
    assert one.vector == pytest.approx(difference / np.linalg.norm(difference))
    assert one.distance == pytest.approx(np.linalg.norm(difference))
    assert one.bias == -one.threshold


def test_principal_components_without_pairs() -> None:
    positive, negative = kinds(12.0)
    one = found(positive, negative[:25], "principal_components")
    assert one.vector @ AXIS > 0.97


@pytest.mark.parametrize("method", METHODS)
def test_what_can_be_told_apart_scores_high_and_what_cannot_does_not(method: Method) -> None:
    auroc, accuracy, separation = cross_validated(*kinds(12.0), method, 5)
    assert (auroc > 0.99, accuracy > 0.95, separation > 5) == (True, True, True)
    # Held-out activations of one kind are told apart by chance only, although the direction of all would fit them.
    by_chance = [cross_validated(*kinds(0.0, 60), method, 5) for _ in range(5)]
    assert 0.3 < np.mean([auroc for auroc, _, _ in by_chance]) < 0.7
    assert 0.3 < np.mean([accuracy for _, accuracy, _ in by_chance]) < 0.7


def test_equal_activations_have_no_direction_and_no_error() -> None:
    same = np.ones((6, 4), np.float32)
    one = found(same, same, "difference_of_means")
    assert not one.vector.any()
    assert cross_validated(same, same, "difference_of_means", 2)[0] == 0.5


@pytest.mark.parametrize("method", METHODS)
def test_folds_that_hold_out_one_activation_of_each_kind(method: Method) -> None:
    """One activation has no standard deviation. Those of all folds have one."""
    near, far = (cross_validated(*kinds(distance, 6), method, 6)[2] for distance in (4.0, 16.0))
    assert 0 < near < far < 40
    assert cross_validated(*(np.full((4, 3), side, np.float32) for side in (1, -1)), method, 4) == (1.0, 1.0, 1e6)


def test_methods_are_named_once() -> None:
    assert get_args(Method) == METHODS
