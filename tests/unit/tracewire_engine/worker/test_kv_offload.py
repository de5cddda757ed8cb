"""The KV of preempted requests in host memory: what is copied, and where it is put back."""

from __future__ import annotations

import pytest

from tracewire_engine.worker.kv_offload import KVBlocks, PreemptedKVCache

torch = pytest.importorskip("torch")


BLOCKS = 12


@pytest.fixture
def pages() -> torch.Tensor:
    """The memory of `BLOCKS` blocks, a page of 64 numbers each."""
    return torch.arange(BLOCKS * 64, dtype=torch.float32).reshape(BLOCKS, 64)


def caches(pages: torch.Tensor) -> list[object]:
    """As vLLM lays them over it: an attention layer's, with two kernel blocks in each; a recurrent layer's states."""
    attention = pages.view(2 * BLOCKS, 2, 16)
    convolution = torch.as_strided(pages, (BLOCKS, 3, 8), (64, 8, 1))
    state = torch.as_strided(pages, (BLOCKS, 4, 5), (64, 5, 1), 24)
    return [attention, [convolution, state]]


def test_what_is_kept_is_put_back_into_other_blocks(pages: torch.Tensor) -> None:
    kept = PreemptedKVCache(KVBlocks(caches(pages), BLOCKS))
    before = pages.clone()
    # Two groups: one is left of its window's blocks, one has its only block.
    kept.save("one", [[0, 0, 5, 7], [3]])
    kept.save("two", [[1, 2], [4]])
    pages.zero_()
    kept.restore("one", [[0, 0, 9, 1, 8], [2]])
    assert torch.equal(pages[[9, 1, 2]], before[[5, 7, 3]])
    assert not pages[[0, 3, 4, 5, 6, 7, 8, 10, 11]].any()
    kept.restore("two", [[5, 6], [7]])
    assert torch.equal(pages[[5, 6, 7]], before[[1, 2, 4]])
    assert len(kept) == 0
    # Nothing is kept any more.
    kept.restore("two", [[10, 11], [8]])
    assert not pages[[8, 10, 11]].any()


def test_zeroed_blocks_are_finite_and_the_others_as_they_were(pages: torch.Tensor) -> None:
    before = pages.clone()
    pages[[2, 7]] = float("nan")
    # A page of the attention's blocks alone, and one that a recurrent layer's states are in.
    KVBlocks(caches(pages), BLOCKS).zero([7, 2])
    assert not pages[[2, 7]].any()
    others = [block for block in range(BLOCKS) if block not in (2, 7)]
    assert torch.equal(pages[others], before[others])


def test_what_is_over_is_forgotten(pages: torch.Tensor) -> None:
    kept = PreemptedKVCache(KVBlocks(caches(pages), BLOCKS))
    for name in ("one", "two"):
        kept.save(name, [[1], [2]])
    kept.forget({"one", "three"})
    assert len(kept) == 1


def test_a_cache_without_blocks_is_an_error() -> None:
    with pytest.raises(ValueError, match="no dimension of 12 blocks"):
        KVBlocks([torch.zeros(7, 5)], BLOCKS)
