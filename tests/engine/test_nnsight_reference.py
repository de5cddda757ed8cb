"""What is streamed over the bus equals what nnsight itself collects for the same block, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def figures() -> dict:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("reference.py"))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["reads", "edits", "forces"])
def test_saves_and_tokens_equal_nnsight_s_own(figures: dict, name: str) -> None:
    ours, theirs = figures["tracewire"][name], figures["nnsight"][name]
    assert ours["token_ids"] == theirs["token_ids"]
    assert ours["saves"] == theirs["saves"]
    assert ours["saves"]


def test_nothing_is_left_in_the_workers(figures: dict) -> None:
    assert figures["tracked"] == 0
