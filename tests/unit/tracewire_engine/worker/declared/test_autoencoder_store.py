"""Autoencoders on the device: computed as in NumPy, there once, within a bound."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.later_plans import ARCHITECTURES, autoencoder
from tracewire_engine.worker.declared import autoencoder_store
from tracewire_engine.worker.declared.autoencoder_store import AutoencodersFull, AutoencoderStore

CPU = torch.device("cpu")


def taken(store: AutoencoderStore, sae: Any) -> Any:
    return store.get(sae.description, sae.packed, np.asarray)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_activations_are_those_of_numpy(architecture: str) -> None:
    sae = autoencoder(architecture)
    values = np.random.default_rng(9).normal(size=(6, sae.description.width)).astype(np.float32)
    one = taken(AutoencoderStore(CPU), sae)
    found, expected = one.activations(torch.from_numpy(values)), sae.encode(values)
    assert 0 < np.count_nonzero(expected) < expected.size
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4)
    rows, vectors = one.chosen([3, 1])
    chosen = one.of_products(torch.from_numpy(values) @ rows[:2].T, vectors, torch.from_numpy(values))
    np.testing.assert_allclose(chosen.numpy(), expected[:, [3, 1]], rtol=1e-4, atol=1e-4)


def test_values_of_another_width_are_refused() -> None:
    one = taken(AutoencoderStore(CPU), autoencoder("relu"))
    with pytest.raises(ValueError, match="width 16 does not fit values of \\[5\\]"):
        one.activations(torch.zeros(2, 5))


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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_autoencoder_in_the_hosts_memory_computes_the_same(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chosen features bit for bit, all features to the rounding of products in pieces."""
    sae = autoencoder(architecture)
    width = sae.description.width
    monkeypatch.setattr(autoencoder_store, "_PIECE", 7 * 4 * width)
    resident, store = taken(AutoencoderStore(CPU), sae), AutoencoderStore(CPU)
    store.bound, store.host_bound = 0, 1 << 20
    one = taken(store, sae)
    assert (one.offloaded, resident.offloaded) == (True, False)
    assert (one.host_nbytes, one.nbytes) == (resident.nbytes, one.vectors.nbytes)
    assert one.streams(chosen=False)
    assert one.streams(chosen=True) == (architecture == "topk")
    assert not resident.streams(chosen=False)
    values = torch.from_numpy(np.random.default_rng(9).normal(size=(6, width)).astype(np.float32))
    for mine, other in zip(one.chosen([3, 1]), resident.chosen([3, 1]), strict=True):
        assert torch.equal(mine, other)
    torch.testing.assert_close(one.products(values), resident.products(values), rtol=1e-6, atol=1e-6)
    found, expected = one.activations(values), resident.activations(values)
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


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
