"""What is streamed over the bus equals what nnsight itself collects for the same block, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def figures(inside: dict[str, Any]) -> dict[str, Any]:
    """Tokens and saves by either way."""
    return inside["reference"]


SAVES = {"reads": {"hidden", "table", "logits"}, "edits": {"norms", "sampled"}, "forces": {"entering"}}


@pytest.mark.parametrize("name", SAVES)
def test_saves_and_tokens_equal_nnsight_s_own(figures: dict, name: str) -> None:
    ours, theirs = figures["tracewire"][name], figures["nnsight"][name]
    assert ours["token_ids"] == theirs["token_ids"]
    assert ours["saves"].keys() == SAVES[name]
    # nnsight knows a save by its address. A value that gets the address of an earlier one counts as a save there.
    assert ours["saves"] == {name: theirs["saves"][name] for name in ours["saves"]}
    assert ours["saves"]


def test_nothing_is_left_in_the_workers(figures: dict) -> None:
    assert figures["tracked"] == 0
