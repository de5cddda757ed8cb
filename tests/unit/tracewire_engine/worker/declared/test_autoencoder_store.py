"""Autoencoders on the device: there once, within a bound, split by their size."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.later_plans import ARCHITECTURES, autoencoder
from tracewire_engine.protocol.autoencoder_parts import size_in_bytes
from tracewire_engine.worker.declared.autoencoder_store import AutoencodersFull, AutoencoderStore

CPU = torch.device("cpu")


def taken(store: AutoencoderStore, sae: Any) -> Any:
    return store.get(sae.description, sae.packed, np.asarray)


def test_equal_autoencoders_are_there_once() -> None:
    store = AutoencoderStore(CPU)
    assert taken(store, autoencoder("relu")) is taken(store, autoencoder("relu", model="another name"))
    assert taken(store, autoencoder("relu")) is not taken(store, autoencoder("topk"))


def test_one_of_the_engine_is_read_when_it_is_needed(tmp_path: Path) -> None:
    store = AutoencoderStore(CPU)
    autoencoder("gated").save(tmp_path)
    store.folders = {"mine": str(tmp_path)}
    one = store.get("mine", None, np.asarray)
    assert one is store.get("mine", None, np.asarray)
    assert one.one.architecture == "gated"
    with pytest.raises(KeyError):
        store.get("other", None, np.asarray)


def test_what_nobody_uses_makes_room_and_what_is_in_use_does_not() -> None:
    store = AutoencoderStore(CPU)
    first = taken(store, autoencoder("relu"))
    released = []
    store.release = lambda: released.append(True)
    store.bound = first.nbytes * 5 // 2
    second = taken(store, autoencoder("topk"))
    assert not released
    # The least recently used is in use, and so stays; the other goes.
    del second
    third = taken(store, autoencoder("jumprelu"))
    assert released
    gc.collect()
    assert taken(store, autoencoder("relu")) is first
    with pytest.raises(AutoencodersFull, match=r"--sae-bytes.*those of running traces take"):
        taken(store, autoencoder("gated"))
    del third
    assert taken(store, autoencoder("gated")).one.architecture == "gated"


def test_the_device_is_used_first_and_both_have_bounds() -> None:
    store = AutoencoderStore(CPU)
    sizes = {one: taken(AutoencoderStore(CPU), autoencoder(one)).nbytes for one in ARCHITECTURES}
    store.bound, store.host_bound = sizes["relu"] * 3 // 2, sizes["gated"] * 3 // 2
    first, second = taken(store, autoencoder("relu")), taken(store, autoencoder("jumprelu"))
    assert (first.offloaded, second.offloaded) == (False, True)
    with pytest.raises(AutoencodersFull, match=r"\(--sae-host-bytes\), of which \d+ are taken"):
        taken(store, autoencoder("topk"))
    # What is not used makes room on its own side only.
    del second
    third = taken(store, autoencoder("topk"))
    assert third.offloaded
    assert taken(store, autoencoder("relu")) is first
    del first
    gc.collect()
    assert not taken(store, autoencoder("gated")).offloaded
    assert taken(store, autoencoder("topk")) is third


def test_large_autoencoders_are_split_and_small_ones_are_not() -> None:
    store, small = AutoencoderStore(CPU), autoencoder("relu")
    large = autoencoder("relu", features=60)
    store.rank, store.ranks = 1, 3
    store.bound = size_in_bytes(large.description) - 1
    one, other = taken(store, small), taken(store, large)
    assert (one.ranks, other.ranks) == (1, 3)
    assert other.nbytes == size_in_bytes(large.description, 1, 3) < store.bound // 2
    assert other.encoder.untyped_storage().nbytes() == other.encoder.nbytes == 4 * 20 * large.description.width
    store.split_above = 0
    assert taken(store, autoencoder("jumprelu")).ranks == 3
    store.bound = store.host_bound = 0
    with pytest.raises(AutoencodersFull, match=r"of \d+ bytes on each of 3 ranks does not fit"):
        taken(store, autoencoder("gated"))
    store.host_bound = 1 << 20
    part = taken(store, autoencoder("gated"))
    assert (part.ranks, part.offloaded, part.host_nbytes) == (3, True, size_in_bytes(part.one, 1, 3))
