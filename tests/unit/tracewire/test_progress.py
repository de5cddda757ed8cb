"""How fast a harvest is, from what it has counted."""

from __future__ import annotations

from tracewire import HarvestProgress


def test_rates_are_those_of_the_whole_run() -> None:
    progress = HarvestProgress(prompts=4, tokens=100, bytes=4000, seconds=8.0)
    assert (progress.tokens_per_second, progress.bytes_per_second) == (12.5, 500.0)


def test_before_any_time_has_passed() -> None:
    assert (HarvestProgress().tokens_per_second, HarvestProgress().bytes_per_second) == (0.0, 0.0)
