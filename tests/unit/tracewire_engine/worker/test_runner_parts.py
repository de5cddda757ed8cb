"""What a runner is made of, without an engine. `test_first_runner.py` takes steps with it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import tracewire_engine  # noqa: F401 (before nnsight)
from tracewire_engine.worker.runner_parts import _AT_ONCE, _LOGITS_BYTES, RunnerParts, _rows_of_logits


def test_what_lies_in_the_kv_cache_changes_later() -> None:
    """As a view of any kind; a copy does not change. vLLM may keep caches of another kind beside tensors."""
    cache = torch.zeros(4, 2)
    parts = SimpleNamespace(kv_caches=[cache, [torch.zeros(1)]])
    assert RunnerParts._changes(parts, cache[1:, 0])
    assert not RunnerParts._changes(parts, cache.clone())
    assert not RunnerParts._changes(SimpleNamespace(), cache)


def test_the_lens_norms_a_stream_before_the_head() -> None:
    """Some models' norms return the residual beside the normed values; a model without a norm has no lens."""
    head = SimpleNamespace(compute_logits=lambda values: values * 10)
    parts = SimpleNamespace(tracewire_norm=lambda values: (values + 1, values), get_model=lambda: head)
    assert RunnerParts._lens(parts, torch.ones(1, 2)).tolist() == [[20.0, 20.0]]
    parts.tracewire_norm = lambda values: values + 2
    assert RunnerParts._lens(parts, torch.ones(1, 2)).tolist() == [[30.0, 30.0]]
    parts.tracewire_norm = None
    with pytest.raises(ValueError, match="no final norm"):
        RunnerParts._lens(parts, torch.ones(1, 2))


def test_logits_of_so_many_rows_are_in_memory_at_once() -> None:
    """A prompt of 500 tokens under a lens at 32 layers would need more than 10 GiB of them."""
    rows = _rows_of_logits(_AT_ONCE, 128_256)
    assert rows == 348
    # In the model's 16 bits, and in the 32 bits of the greatest.
    assert rows * 128_256 * (2 + 4) <= _AT_ONCE < 2 * _LOGITS_BYTES + 1
