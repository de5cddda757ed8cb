"""Blocks in hosts on two tensor-parallel ranks: what they do and save is what they do and save inline, bit for bit."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.parallel.layouts import CAPACITY, Served, served
from tests.support.parallel.scenarios import SCENARIOS, same

pytestmark = pytest.mark.full

#: Only declared interventions, for which it makes no difference.
WITHOUT_BLOCKS = {name for name in SCENARIOS if name.startswith("declared_")} - {"declared_and_a_block"}


@pytest.fixture(scope="module")
async def hosted(starts_engine: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """An engine of two ranks, as `ranks` is one, whose blocks run in hosts."""
    options = ("--tensor-parallel-size", "2", "--max-num-seqs", "3", "--capacity", str(CAPACITY), "--blocks", "host")
    async with served(tmp_path_factory.mktemp("hosted"), *options) as engine:
        yield engine


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in WITHOUT_BLOCKS])
async def test_it_is_as_inline(name: str, hosted: Served, ranks: Served) -> None:
    async with hosted.client() as client:
        ours = await SCENARIOS[name](client, await client.models.get("demo", timeout=30))
    async with ranks.client() as client:
        theirs = await SCENARIOS[name](client, await client.models.get("demo", timeout=30))
    assert not same(theirs, ours)
