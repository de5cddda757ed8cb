"""Speculative decoding by models, and by a class of one's own: requests come to what they do without drafts."""

# mypy: ignore-errors

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.draft_models import DRAFT_MODELS, Follower, drafting_model
from tests.support.drafted_kinds import DRAFTED
from tests.support.engine_inside import counts, engine_inside, forgotten
from tests.support.speculation import compared
from tracewire import Client, connect

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("method", [*DRAFT_MODELS, "custom_class"])
async def test_requests_of_all_kinds_come_to_what_they_do_without_drafts(
    method: str, starts_engine: None, client: Client, tmp_path: Path
) -> None:
    """Plain ones, and beside them ones with blocks and with declared interventions. Prints the acceptance rate."""
    own: dict[str, Any] = {"method": method, "model": f"{Follower.__module__}.{Follower.__name__}"}
    config = drafting_model(method, tmp_path) if method in DRAFT_MODELS else {**own, "num_speculative_tokens": 3}
    options = {"max_num_seqs": 64, "kv_cache_memory_bytes": 256 << 20}
    async with engine_inside(speculative_config=config, **options) as (engine, url), connect(url) as one:
        await compared(one, client, 4 * len(DRAFTED), 32, 20)
        there = await counts(engine)
        await forgotten(engine)
    print(f"{method}: {there['taken']} of {there['drafted']} ({there['taken'] / there['drafted']:.2f})")
    assert there["drafted"] > 4 * len(DRAFTED)
    assert there["taken"] > 0
