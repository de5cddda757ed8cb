"""How ranks split an autoencoder."""

from __future__ import annotations

import pytest

from tests.support.later_plans import autoencoder
from tracewire_bus.domain.autoencoders import size_of
from tracewire_engine.protocol.autoencoder_parts import features_of, parts_of, size_in_bytes


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 24])
def test_each_feature_is_on_one_rank_and_each_rank_has_some(ranks: int) -> None:
    one = autoencoder("relu").description
    parts = [features_of(one, rank, ranks) for rank in range(ranks)]
    assert [feature for part in parts for feature in part] == list(range(one.features))
    assert all(parts)
    assert max(map(len, parts)) == len(parts[-1])


@pytest.mark.parametrize("architecture", ["relu", "gated"])
def test_only_rows_are_split(architecture: str) -> None:
    one = autoencoder(architecture).description
    assert size_in_bytes(one) == 4 * size_of(one)
    rest = size_in_bytes(one) - 8 * one.width * one.features
    parts = [size_in_bytes(one, rank, 3) for rank in range(3)]
    assert sum(part - rest for part in parts) == size_in_bytes(one) - rest


def test_an_autoencoder_is_split_by_its_size_alone() -> None:
    one = autoencoder("topk").description
    size = size_in_bytes(one)
    assert [parts_of(one, 2, above) for above in (0, size - 1, size)] == [2, 2, 1]
    # With fewer features than ranks, some would have none.
    assert [parts_of(one, ranks, 0) for ranks in (1, 24, 25)] == [1, 24, 1]
