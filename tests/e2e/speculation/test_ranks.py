"""Speculative decoding on two tensor-parallel ranks: requests come to what they do on two ranks without drafts."""

# mypy: ignore-errors

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.draft_models import drafting_model
from tests.support.drafted_kinds import DRAFTED
from tests.support.engine_inside import counts, engine_inside, forgotten
from tests.support.speculation import NGRAM, came_to, check_same
from tracewire import connect

pytestmark = [pytest.mark.full, pytest.mark.timeout(2400)]


async def test_two_ranks_take_the_same_drafts(
    starts_engine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By n-grams, and by a draft model that is on both ranks, too. Prints the acceptance rates."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    options = {"tensor_parallel_size": 2, "max_num_seqs": 32, "kv_cache_memory_bytes": 128 << 20}
    asked = 4 * len(DRAFTED), 32, 12
    async with engine_inside(**options) as (engine, url), connect(url) as client:
        known = await came_to(client, *asked)
        await forgotten(engine)
    for config in (NGRAM, drafting_model("draft_model", tmp_path)):
        async with engine_inside(speculative_config=config, **options) as (engine, url), connect(url) as client:
            found = await came_to(client, *asked)
            there = await counts(engine)
            await forgotten(engine)
        print(f"{config['method']}: {there['taken']} of {there['drafted']} ({there['taken'] / there['drafted']:.2f})")
        check_same(found, known)
        assert there["taken"] > 0
