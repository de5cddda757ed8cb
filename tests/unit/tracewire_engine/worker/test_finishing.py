"""The ends of a worker's requests: what the final says of what a block saved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tracewire_engine  # noqa: F401 (before nnsight)
from tracewire_bus.wire.digests import digest
from tracewire_engine.worker.blocks import time_limit
from tracewire_engine.worker.finishing import RequestFinisher
from tracewire_engine.worker.large_arrays import LargeArrayBudget
from tracewire_engine.worker.reporting import StepReporter
from tracewire_engine.worker.requests import RequestProgress
from tracewire_engine.worker.save_tracker import SaveTracker


def test_where_it_is_checked_the_final_names_the_digests_of_what_nnsight_collected() -> None:
    """Whatever the tracker holds: a consumer's fold is compared with that."""
    held, collected = {"xs": [torch.ones(2)]}, {"xs": [torch.zeros(2)]}
    digests = []
    for checks in (False, True):
        reporter = StepReporter(None, None, SimpleNamespace(declared=None), lambda _: None)
        finisher = RequestFinisher(SimpleNamespace(), reporter, (lambda _: collected) if checks else None)
        request = SimpleNamespace(engine_id="t0", index=0, error=None, mediator=None, saves=lambda: held)
        finisher._report_finish(request, RequestProgress(LargeArrayBudget()), None, lambda own: own)
        ((entry,),) = [finish.manifest for finish in reporter.unsent.report.finishes]
        digests.append(entry.digest)
    assert digests == [digest(held["xs"]), digest(collected["xs"])]


@pytest.mark.parametrize("large", [True, False])
def test_the_end_of_shared_values_is_sent_in_nobody_s_time(large: bool) -> None:
    """In a host, a large array waits for the worker as it is sent."""
    found: list[tuple[Any, bool, bool]] = []

    def finish(record: Any, ending: Any = None) -> None:
        found.append((record.error, ending is not None, time_limit._running is not None))

    reporter: Any = SimpleNamespace(finish=finish)
    run: Any = SimpleNamespace(
        tracker=SaveTracker(LargeArrayBudget(1000 if large else 0)), name="s", steps=0, values={"x": torch.ones(1000)}
    )
    RequestFinisher(SimpleNamespace(), reporter)._report_shared_end(run)  # type: ignore[arg-type]
    assert found == [(None, large, False)]
