"""What patches of other prompts take: kept once, in order, within a bound, and dropped with the run."""

from __future__ import annotations

import pytest
import torch

from tracewire_engine.worker.declared import kept_rows
from tracewire_engine.worker.declared.kept_rows import KeptStore


def test_pieces_are_rows_in_order_and_the_first_stay() -> None:
    store = KeptStore()
    kept = store.of("run", 3)
    rows = torch.arange(12.0).view(4, 3)
    kept.keep("here", 2, rows[2:])
    kept.keep("here", 0, rows[:2])
    rows.zero_()
    kept.keep("here", 2, torch.ones(2, 3))
    assert store.of("run", 3) is kept
    assert torch.equal(kept.rows("here"), torch.arange(12.0).view(4, 3))
    with pytest.raises(ValueError, match="was not computed here"):
        kept.rows("there")
    store.forget("other")
    assert store.of("run", 3) is kept
    store.forget("run")
    assert store.of("run", 3) is not kept


def test_values_keep_their_dtype_and_all_runs_share_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_rows, "MOST_BYTES", 40)
    store = KeptStore()
    store.of("one", 0).keep("here", 0, torch.ones(4, 4, dtype=torch.bfloat16))
    assert store.of("one", 0).nbytes == 32
    with pytest.raises(ValueError, match="need 32 bytes, and 8 are left for them"):
        store.of("other", 0).keep("here", 0, torch.ones(4, 4, dtype=torch.bfloat16))
    store.forget("one")
    store.of("other", 0).keep("here", 0, torch.ones(4, 4, dtype=torch.bfloat16))
