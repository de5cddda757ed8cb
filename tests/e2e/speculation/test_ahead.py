"""Drafts with asynchronous scheduling: vLLM plans a step before it knows which drafts of the last one were taken.

vLLM does so on GPUs. Here it does so on a CPU (`tests/support/interpreted`). The tests of declared interventions that
are drafted run on such an engine, too.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from vllm.platforms.cpu import CpuPlatform

from tests.e2e.speculation.test_declared import (  # noqa: F401 (they run here)
    compared_when_preempted,
    test_a_change_while_it_runs_holds_from_the_token_that_the_event_names,
    test_a_standing_intervention_acts_on_the_drafts_of_plain_requests,
    test_it_ends_at_the_token_at_which_it_ends_without_drafts,
    test_it_is_paused_again_and_again_beside_others,
)
from tests.support.draft_models import drafting_model
from tests.support.drafted_kinds import DRAFTED
from tests.support.engine_inside import counts, engine_inside, forgotten
from tests.support.interpreted.as_told import leave_scheduling
from tests.support.runners import planning_ahead
from tests.support.speculation import compared
from tracewire import Client, connect

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def ahead() -> Any:
    """The options of an engine with asynchronous scheduling, which vLLM leaves as they are meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        leave_scheduling(CpuPlatform, patch.setattr)
        for name, value in planning_ahead().items():
            patch.setenv(name, value)
        yield {"async_scheduling": True}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A draft model: vLLM has no asynchronous scheduling with n-grams."""
    return drafting_model("draft_model", tmp_path_factory.mktemp("drafts"))


@pytest.fixture(scope="module")
async def drafted(starts_engine: None, ahead: Any, config: Any) -> AsyncIterator[tuple[Any, str]]:
    options = {"max_num_seqs": 64, "kv_cache_memory_bytes": 256 << 20, **ahead}
    async with engine_inside(speculative_config=config, **options) as served:
        assert served[0].llm.vllm_config.scheduler_config.async_scheduling
        yield served
        await forgotten(served[0])


async def test_requests_of_all_kinds_come_to_what_they_do_without_drafts(
    drafted: tuple[Any, str], ours: Client, client: Client
) -> None:
    """Plain ones, and beside them ones with blocks and with declared interventions. Prints the acceptance rate."""
    before = await counts(drafted[0])
    await compared(ours, client, 4 * len(DRAFTED), 32, 20)
    after = await counts(drafted[0])
    proposed, taken = (after[name] - before[name] for name in ("drafted", "taken"))
    print(f"ahead: {taken} of {proposed} ({taken / proposed:.2f})")
    assert taken > 0


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
async def test_other_methods_of_drafting_ahead(
    method: str, ahead: Any, starts_engine: None, client: Client, tmp_path: Path
) -> None:
    options = {"max_num_seqs": 64, "kv_cache_memory_bytes": 256 << 20, **ahead}
    async with engine_inside(speculative_config=drafting_model(method, tmp_path), **options) as (engine, url):
        async with connect(url) as one:
            await compared(one, client, 4 * len(DRAFTED), 32, 20)
        assert (await counts(engine))["taken"] > 0
        await forgotten(engine)


async def test_it_goes_on_where_it_was_when_it_was_preempted(ahead: Any, config: Any, starts_engine: None) -> None:
    """With KV blocks for a few requests, in float32, with copies of what preempted ones have computed, and without."""
    short = {"dtype": "float32", "max_num_seqs": 16, "max_model_len": 512}
    await compared_when_preempted(
        {**short, "async_scheduling": False, "kv_cache_memory_bytes": 256 << 20},
        {**short, **ahead, "speculative_config": config, "kv_cache_memory_bytes": 12 << 20},
    )
