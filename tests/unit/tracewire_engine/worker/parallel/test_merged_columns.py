"""The columns of merged layers, gathered from ranks and split among them."""

from __future__ import annotations

import pytest
import torch

from tracewire_engine.worker.parallel.merged_columns import gathered, piece


@pytest.mark.parametrize(
    ("sizes", "ranks", "replicas"), [([4, 2, 2], 2, 1), ([4, 2, 2], 4, 2), ([3, 3], 2, 1), ([2, 2, 2], 4, 4)]
)
def test_what_is_split_is_gathered_in_its_order(sizes: list[int], ranks: int, replicas: int) -> None:
    width = sizes[0] * ranks + sum(sizes[1:]) * ranks // replicas
    whole = torch.arange(3.0 * width).reshape(3, width)
    pieces = [piece(whole, sizes, ranks, replicas, rank) for rank in range(ranks)]
    assert [part.shape for part in pieces] == [(3, sum(sizes))] * ranks
    # The first rank begins each projection with what the layer begins it with.
    assert pieces[0][0, 0] == whole[0, 0]
    assert pieces[0][0, sizes[0]] == whole[0, sizes[0] * ranks]
    assert torch.equal(gathered(torch.cat(pieces, -1), sizes, ranks, replicas), whole)
