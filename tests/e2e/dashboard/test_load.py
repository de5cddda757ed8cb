"""Fifty traces at once in one page."""

from __future__ import annotations

import json
import sys
from typing import Any

import anyio
import pytest

from tests.support import ROOT
from tests.support.browser import chromium
from tests.support.dashboard_load import loaded


async def test_the_command_prints_figures() -> None:
    chromium()
    command = [sys.executable, "-m", "tests.support.dashboard_load", "--traces", "4", "--tokens", "20", "--json"]
    done = await anyio.run_process(command, cwd=ROOT, stderr=None)
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["traces"], found["incomplete"]) == (4, [])
    assert found["frames"] > 0


@pytest.mark.parametrize("height", [1000, 10_000], ids=["a window", "all in view"])
@pytest.mark.full
async def test_fifty_traces_at_once_have_all_of_their_text(height: int, record_property: Any) -> None:
    found = await loaded(traces=50, tokens=300, rate=20.0, height=height)
    record_property("figures", found)
    print(found)
    assert found["incomplete"] == []
    # The page has drawn while they ran, and not only at the end.
    assert found["frames"] > found["traces"]
