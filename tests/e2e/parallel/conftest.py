"""An engine of two stages, which starts while other tests run, and one of two tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.engine_process import is_asked_for, is_worker
from tests.support.parallel.kinds import SPLIT_BYTES
from tests.support.parallel.layouts import CAPACITY, Served, served


@pytest.fixture(scope="package")
async def stages_starting(starts_engine: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """An engine of two pipeline stages, with a core each, on its way."""
    async with served(tmp_path_factory.mktemp("stages"), "--pipeline-parallel-size", "2", wait=False) as engine:
        yield engine


@pytest.fixture(scope="package")
async def ranks(starts_engine: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """An engine of two ranks, on a core each, which runs three requests at once. The last test kills it."""
    options = ("--tensor-parallel-size", "2", "--max-num-seqs", "3", "--capacity", str(CAPACITY))
    split = ("--sae-split-bytes", str(SPLIT_BYTES))
    async with served(tmp_path_factory.mktemp("ranks"), *options, *split) as engine:
        yield engine


@pytest.fixture(scope="package", autouse=True)
def _stages_ahead(request: pytest.FixtureRequest) -> None:
    if not is_worker() and is_asked_for("stages_starting", request.session):
        request.getfixturevalue("stages_starting")
