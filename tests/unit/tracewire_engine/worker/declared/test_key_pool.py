"""The keys that attention patterns need: where they are kept, and how much room they take."""

from __future__ import annotations

import pytest
import torch

from tracewire_engine.worker.declared import key_pool
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
    with pytest.raises(ValueError, match="need 32 bytes beside the KV cache, and 5 are left"):
        KeyPool().fit(LIKE, 1, 5)


def test_where_the_room_ends_a_pool_has_what_it_needs_and_no_more() -> None:
    """Doubled it would not fit, nor with the next 256 positions."""
    pool = KeyPool()
    each = 2 * 4 * 4
    pool.admit({7: 512}, LIKE, 1000 * each)
    assert pool.keys is not None
    pool.keys[0] = 1.0
    pool.admit({7: 513}, LIKE, 1000 * each)
    assert pool.keys.shape == (1, 2, 768, 4)
    pool.admit({7: 800}, LIKE, 1000 * each)
    assert pool.keys.shape == (1, 2, 800, 4)
    assert pool.keys[0, :, :512].all()
    with pytest.raises(ValueError, match=f"1 requests and 1001 positions need {1001 * each} bytes"):
        pool.admit({7: 1001}, LIKE, 1000 * each)
    # Room that is not needed is given up for a request that needs some.
    doubled = KeyPool()
    doubled.admit({7: 256}, LIKE, 1000 * each)
    doubled.admit({7: 257}, LIKE, 1000 * each)
    assert doubled.keys is not None
    assert doubled.keys.shape[2] == 512
    doubled.keys[0] = 1.0
    doubled.admit({9: 10, 8: 3}, LIKE, 800 * each)
    assert doubled.keys.shape == (3, 2, 257, 4)
    assert doubled.keys[0].all()


def test_a_request_without_room_takes_none_and_those_before_it_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_pool, "MOST_BYTES", 1000 * 2 * 4 * 4)
    pools = KeyPools()
    pool, other = pools.at("a"), pools.at("b")
    assert not pools.admit(pool, {1: 600}, LIKE)
    assert not pools.admit(other, {2: 5}, LIKE)
    kept = pool.keys
    failed = pools.admit(pool, {2: 10, 1: 601, 3: 1}, LIKE)
    assert sorted(failed) == [2, 3]
    assert pool.keys is kept
    assert pool.has(1)
    # What it has elsewhere is free for others, and the pool stays where plans have it.
    assert not other.has(2)
    assert other.nbytes == 0
    assert pools.at("b") is other
    assert not pools.admit(pool, {1: 1000}, LIKE)
    assert pool.nbytes == key_pool.MOST_BYTES


def test_pools_double_for_as_long_as_all_of_them_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones would take what the last ones need."""
    monkeypatch.setattr(key_pool, "MOST_BYTES", 2600 * 2 * 4 * 4)
    pools = KeyPools()
    layers = [pools.at(str(layer)) for layer in range(4)]
    for length in (1, 256, 300, 512):
        for layer in layers:
            assert not pools.admit(layer, {1: length}, LIKE)
    assert [layer.nbytes for layer in layers] == [512 * 2 * 4 * 4] * 4
    # Twice as much would be more than there is, but for one layer.
    assert not pools.admit(layers[0], {1: 520}, LIKE)
    assert layers[0].nbytes == 768 * 2 * 4 * 4
    assert not pools.admit(layers[1], {1: 520}, LIKE)
    assert not pools.admit(layers[2], {1: 520}, LIKE)
    assert not pools.admit(layers[3], {1: 520}, LIKE)
