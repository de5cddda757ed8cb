"""How the tests of schedulers run: with one step under way, and with two."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[1, 2], ids=["sync", "async"])
def depth(request: pytest.FixtureRequest) -> int:
    """How many steps are under way at once."""
    return request.param
