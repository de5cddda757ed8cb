"""The mark of what starts engines, and one engine that starts while other tests run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.distributed.layouts import Served, served
from tests.engine_process import is_asked_for

#: Test files of this folder that start engines.
ENGINES = {"test_tensor_parallel.py", "test_pipeline_parallel.py", "test_both_parallel.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts an engine, so that `make test-engineless` can leave it out."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and item.path.name in ENGINES:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="package")
async def stages_starting(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """An engine of two pipeline stages, with a core each, on its way."""
    async with served(tmp_path_factory.mktemp("stages"), "--pipeline-parallel-size", "2", wait=False) as engine:
        yield engine


@pytest.fixture(scope="package", autouse=True)
def _stages_ahead(request: pytest.FixtureRequest) -> None:
    if is_asked_for("stages_starting", request.session):
        request.getfixturevalue("stages_starting")
