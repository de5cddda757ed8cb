"""What is streamed over the bus equals what nnsight itself collects for the same block, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def figures(inside: dict[str, Any]) -> dict[str, Any]:
    """Tokens and saves by either way."""
    return inside["reference"]


@pytest.mark.parametrize("name", ["reads", "edits", "forces"])
def test_saves_and_tokens_equal_nnsight_s_own(figures: dict, name: str) -> None:
    ours, theirs = figures["tracewire"][name], figures["nnsight"][name]
    assert ours["token_ids"] == theirs["token_ids"]
    assert ours["saves"] == theirs["saves"]
    assert ours["saves"]


def test_nothing_is_left_in_the_workers(figures: dict) -> None:
    assert figures["tracked"] == 0
