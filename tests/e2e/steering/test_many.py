"""Many traces, half of them cancelled: the others do not notice, and nothing is left in the engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engine_process import looked_at_inside


@pytest.mark.usefixtures("starts_engine")
@pytest.mark.parametrize("count", [80, pytest.param(400, marks=pytest.mark.full)])
def test_cancelling_half_of_many_leaves_nothing_behind_and_the_others_alone(
    count: int, request: pytest.FixtureRequest
) -> None:
    found: dict[str, Any] = request.getfixturevalue("inside") if count == 80 else looked_at_inside("--many", str(count))
    figures = found["many"]
    assert figures["finals"] == [1]
    # Some may have finished before they heard of it.
    assert 3 * count // 8 <= figures["cancelled"] <= count // 2
    assert figures["finished"] == count // 2
    assert figures["differ"] == []
    assert figures["prefixes"] == count // 2
    assert figures["tracked"] == 0
    assert figures["kv_free"] is True
