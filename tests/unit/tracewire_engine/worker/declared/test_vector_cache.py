"""Vectors on the device, by what they were made of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.vectors import encoded
from tracewire_engine.protocol.input_files import vector_path
from tracewire_engine.worker.declared import vector_cache
from tracewire_engine.worker.declared.vector_cache import VectorCache


def test_the_least_recently_used_go_beyond_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_cache, "CACHE_BYTES", 3 * 16)
    cache = VectorCache(torch.device("cpu"))
    made = [cache.get("rows", np.full(4, number, np.float32), np.atleast_2d) for number in range(3)]
    assert cache.get("rows", np.zeros(4, np.float32), np.atleast_2d) is made[0]
    cache.get("rows", np.full(4, 3, np.float32), np.atleast_2d)
    assert cache.get("rows", np.zeros(4, np.float32), np.atleast_2d) is made[0]
    assert cache.get("rows", np.ones(4, np.float32), np.atleast_2d) is not made[1]
    # Another purpose makes another vector of it.
    assert cache.get("double", np.zeros(4, np.float32), lambda one: one * 2) is not made[0]


def test_a_reference_is_read_from_its_file(tmp_path: Path) -> None:
    cache = VectorCache(torch.device("cpu"))
    cache.folder = tmp_path
    array = np.arange(6, dtype=np.float32)
    ref, _ = encoded(array)
    with pytest.raises(FileNotFoundError):
        cache.read(ref)
    vector_path(tmp_path, ref).write_bytes(array.tobytes())
    assert np.array_equal(cache.read(ref), array)
    assert cache.get("rows", ref, np.atleast_2d).shape == (1, 6)
