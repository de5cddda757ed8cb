"""Directions between two kinds of activations, and how well each tells held-out ones apart.

NumPy finds differences of means and principal components. scikit-learn fits logistic probes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

from tracewire.library.packages import package

__all__ = ["METHODS", "Direction", "LayerScore", "Method", "cross_validated", "found"]

#: An array of NumPy, which is imported when it is first needed.
Array: TypeAlias = Any
Method: TypeAlias = Literal["difference_of_means", "principal_components", "logistic"]
METHODS: Final = get_args(Method)
#: The separation of activations that are alike within each kind.
_FAR: Final = 1e6


class Direction(NamedTuple):
    """A direction between two kinds of activations.

    Attributes:
        vector: the direction from the negative to the positive kind, float32 `[hidden]`, of unit length.
        threshold: the projection half-way between the kinds; of a logistic probe, where both are equally likely.
        distance: how far the two means lie apart along it.
        weight, bias: of a logistic probe, whose sigmoid is the positive kind's probability; else the vector and minus
            the threshold.
    """

    vector: Array
    threshold: float
    distance: float
    weight: Array
    bias: float


class LayerScore(NamedTuple):
    """How well the direction of one location tells held-out activations apart.

    Attributes:
        layer: the layer's index; None for a location that is no layer.
        at: the location.
        auroc: the probability that a positive activation projects higher than a negative one.
        accuracy: how many are on their side of the threshold.
        separation: how far the means of the projections lie apart, in their standard deviations, over all folds.
        distance: how far the means of all activations lie apart along the direction of all.
    """

    layer: int | None
    at: str
    auroc: float
    accuracy: float
    separation: float
    distance: float


def found(positive: Array, negative: Array, method: Method) -> Direction:
    """The direction between activations `[prompts, hidden]` of two kinds.

    `principal_components` takes the first principal component of the differences between the pairs of both kinds, or,
    if their numbers differ, of all activations. Its sign is that from the negative to the positive kind.

    Raises:
        LibraryMissing: `logistic` needs scikit-learn.
    """

    import numpy as np

    positive, negative = positive.astype(np.float64), negative.astype(np.float64)
    if method == "logistic":
        return _logistic(positive, negative)
    means = positive.mean(0) - negative.mean(0)
    direction = means
    if method == "principal_components":
        pairs = len(positive) == len(negative)
        rows = positive - negative if pairs else np.concatenate([positive, negative])
        rows = rows if pairs else rows - rows.mean(0)
        direction = np.linalg.svd(rows, full_matrices=False)[2][0]
        direction = direction if direction @ means >= 0 else -direction
    length = float(np.linalg.norm(direction))
    vector = direction / (length or 1.0)
    threshold = float((positive.mean(0) + negative.mean(0)) @ vector / 2)
    unit = vector.astype(np.float32)
    return Direction(unit, threshold, float(means @ vector), unit, -threshold)


def _logistic(positive: Array, negative: Array) -> Direction:
    """A logistic probe on standardised activations, as a weight and a bias for the activations as they are."""

    import numpy as np

    linear = package("sklearn.linear_model", "a logistic probe", "extract")
    both = np.concatenate([positive, negative])
    labels = np.r_[np.ones(len(positive)), np.zeros(len(negative))]
    mean, spread = both.mean(0), both.std(0)
    spread[spread == 0] = 1.0
    model = linear.LogisticRegression(max_iter=1000, class_weight="balanced").fit((both - mean) / spread, labels)
    weight = model.coef_[0] / spread
    bias = float(model.intercept_[0] - weight @ mean)
    length = float(np.linalg.norm(weight)) or 1.0
    vector = weight / length
    distance = float((positive.mean(0) - negative.mean(0)) @ vector)
    return Direction(vector.astype(np.float32), -bias / length, distance, weight.astype(np.float32), bias)


def cross_validated(positive: Array, negative: Array, method: Method, folds: int) -> tuple[float, float, float]:
    """The AUROC, accuracy and separation of held-out activations, over `folds` folds of both kinds.

    AUROC and accuracy are means over the folds. A fold may hold out one activation of a kind, which has no standard
    deviation, so the separation is that of all folds together, of the projections less the threshold of the fold.
    """

    import numpy as np

    scores, above, below = [], [], []
    for kept, held_out in _folds(positive, negative, folds):
        direction = found(*kept, method)
        first, second = (rows.astype(np.float64) @ direction.vector - direction.threshold for rows in held_out)
        scores.append(_scores(first, second))
        above.append(first)
        below.append(second)
    auroc, accuracy = np.mean(scores, axis=0)
    return float(auroc), float(accuracy), _separation(np.concatenate(above), np.concatenate(below))


def _folds(positive: Array, negative: Array, folds: int) -> Iterator[tuple[tuple[Array, Array], tuple[Array, Array]]]:
    """The activations of both kinds that are kept, and those that are held out. Pairs stay together."""

    import numpy as np

    places = [np.arange(len(rows)) % folds for rows in (positive, negative)]
    for fold in range(folds):
        first, second = (place == fold for place in places)
        yield (positive[~first], negative[~second]), (positive[first], negative[second])


def _scores(above: Array, below: Array) -> tuple[float, float]:
    """The AUROC and the accuracy of projections, whose threshold is 0."""
    pairs = above[:, None] - below[None, :]
    auroc = float((pairs > 0).mean() + (pairs == 0).mean() / 2)
    return auroc, float(((above > 0).mean() + (below <= 0).mean()) / 2)


def _separation(above: Array, below: Array) -> float:
    """How far the means of projections lie apart, in their standard deviations: at most `_FAR`."""

    import numpy as np

    apart = float(above.mean() - below.mean())
    spread = float(np.sqrt((above.var() + below.var()) / 2))
    return apart / max(spread, abs(apart) / _FAR) if apart else 0.0
