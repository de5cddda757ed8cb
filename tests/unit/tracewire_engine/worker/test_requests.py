"""How far a request has been reported, and why its saves could not be read."""

from __future__ import annotations

from tracewire_engine.worker.large_arrays import LargeArrayBudget
from tracewire_engine.worker.requests import RequestProgress


def test_a_save_that_could_not_be_read_is_the_request_s_failure_once() -> None:
    progress = RequestProgress(LargeArrayBudget(0))
    progress.take_failure()
    assert progress.failure is None
    progress.tracker.broken = "scores", ValueError("no")
    progress.take_failure()
    first = progress.failure
    assert first is not None
    assert first.type == "ValueError"
    assert first.message == "no (while the save 'scores' was read)"
    progress.tracker.broken = "others", TypeError("later")
    progress.take_failure()
    assert progress.failure is first
