"""The keys that attention patterns need: where they are kept, and how much room they take."""

from __future__ import annotations

import pytest
import torch

from tracewire_engine.worker.declared.key_pool import KeyPool, KeyPools

LIKE = torch.zeros(1, 2, 4)


def test_a_pool_grows_and_keeps_what_it_has() -> None:
    pool = KeyPool()
    assert pool.slots([7]) == [0]
    first = pool.fit(LIKE, 3, 1 << 20)
    first[0, :, :3] = 1.0
    assert pool.fit(LIKE, 200, 1 << 20) is first
    assert pool.slots([7, 9]) == [0, 1]
    grown = pool.fit(LIKE, 300, 1 << 20)
    assert grown.shape == (2, 2, 512, 4)
    assert grown[0, :, :3].all()
    assert not grown[1].any()


def test_a_slot_is_free_again_and_the_pool_goes_with_its_last_request() -> None:
    pools = KeyPools()
    pool = pools.at("a")
    assert pool.slots([1, 2, 3]) == [0, 1, 2]
    pool.fit(LIKE, 1, 1 << 20)
    pools.release(2)
    assert pool.slots([4, 1]) == [1, 0]
    for owner in (1, 3, 4):
        pools.release(owner)
    assert pools.pools == {}


def test_pools_share_what_there_is() -> None:
    pools = KeyPools()
    pools.at("a").slots([1])
    pools.at("a").fit(LIKE, 1, 1 << 20)
    assert pools.left(pools.at("a")) - pools.left(pools.at("b")) == pools.at("a").nbytes == 256 * 2 * 4 * 4
    with pytest.raises(ValueError, match="need 8192 bytes beside the KV cache, and 5 are left"):
        KeyPool().fit(LIKE, 1, 5)
