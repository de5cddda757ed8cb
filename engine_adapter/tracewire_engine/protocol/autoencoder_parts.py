"""How tensor-parallel ranks split an autoencoder, and how many bytes each part takes."""

from __future__ import annotations

from tracewire_bus.domain.autoencoders import size_of
from tracewire_bus.wire.feature_kinds import Autoencoder

__all__ = ["features_of", "parts_of", "size_in_bytes"]


def features_of(one: Autoencoder, rank: int, ranks: int) -> range:
    """The features of a rank, of an autoencoder that is split over so many ranks. Each has some."""
    return range(one.features * rank // ranks, one.features * (rank + 1) // ranks)


def size_in_bytes(one: Autoencoder, rank: int = 0, ranks: int = 1) -> int:
    """The bytes of a rank's part of an autoencoder's weights, float32."""
    elsewhere = one.features - len(features_of(one, rank, ranks))
    # Of other features, a rank has what has an element for each feature, and no rows.
    return 4 * size_of(one) - 8 * one.width * elsewhere


def parts_of(one: Autoencoder, ranks: int, above: int) -> int:
    """Over how many of an engine's ranks an autoencoder is split, if those of more than `above` bytes are."""
    return ranks if size_in_bytes(one) > above and one.features >= ranks else 1
