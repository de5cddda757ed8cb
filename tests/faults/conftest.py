"""The mark of what starts engines."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of this folder that use a real engine end in `_engine.py`."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and item.path.stem.endswith("_engine"):
            item.add_marker(pytest.mark.engine)
