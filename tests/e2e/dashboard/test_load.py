"""Fifty traces at once in one page."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.dashboard_load import loaded


@pytest.mark.parametrize("height", [1000, 10_000], ids=["a window", "all in view"])
@pytest.mark.full
async def test_fifty_traces_at_once_have_all_of_their_text(height: int, record_property: Any) -> None:
    found = await loaded(traces=50, tokens=300, rate=20.0, height=height)
    record_property("figures", found)
    print(found)
    assert found["incomplete"] == []
    # The page has drawn while they ran, and not only at the end.
    assert found["frames"] > found["traces"]
