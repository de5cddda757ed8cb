"""The mark of what starts engines."""

from __future__ import annotations

from pathlib import Path

import pytest

#: Test files of this folder that start engines.
ENGINES = {"test_tensor_parallel.py", "test_pipeline_parallel.py", "test_both_parallel.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts an engine, so that `make test-engineless` can leave it out."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and item.path.name in ENGINES:
            item.add_marker(pytest.mark.engine)
