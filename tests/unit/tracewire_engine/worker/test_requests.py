"""How far a request has been reported, why its saves could not be read, and what a host is given of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tracewire_bus.wire.packing import pack, unpack
from tracewire_engine.link.step_link import encode_changes
from tracewire_engine.protocol.keys import BLOCK_ARG, LIVE_ARG, RUN_ARG
from tracewire_engine.worker.blocks.live_params import LiveRuns
from tracewire_engine.worker.declared.plan import DeclaredRequests
from tracewire_engine.worker.large_arrays import LargeArrayBudget
from tracewire_engine.worker.requests import RequestProgress, TracedRequests


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


def test_a_host_starts_with_changes_that_came_before_the_trace() -> None:
    """It is told of a change only when it has the trace."""
    opened: list[dict[str, Any]] = []
    expected: list[str] = []
    hosts: Any = SimpleNamespace(
        expect=lambda name, _: expected.append(name),
        open=lambda *given: opened.append(given[2]),
        steer=lambda _: None,
    )
    blocks: Any = SimpleNamespace(device=torch.device("cpu"), check_permit=lambda *_: None)
    requests = TracedRequests(blocks, DeclaredRequests(torch.device("cpu")), LiveRuns(), LargeArrayBudget(0), None)
    requests.hosts = hosts
    requests.steer(encode_changes({"changed": (1, {"alpha": 2.0})}))
    requests.live.apply()
    for run in ("changed", "unchanged"):
        arguments = {BLOCK_ARG: b"", RUN_ARG: run, LIVE_ARG: pack({"alpha": 0.0, "beta": 1.0})}
        params = SimpleNamespace(extra_args=arguments)
        requests.add([SimpleNamespace(req_id=f"{run}-00000000", sampling_params=params)])
    first, second = [unpack(given[LIVE_ARG]) for given in opened]
    assert first == {"alpha": 2.0, "beta": 1.0}
    assert second == {"alpha": 0.0, "beta": 1.0}
    # One that fails here is known all the same: the other ranks and stages may be able to take it.
    broken = SimpleNamespace(extra_args={BLOCK_ARG: b"", RUN_ARG: "broken", LIVE_ARG: b"\xc1"})
    requests.add([SimpleNamespace(req_id="broken-00000000", sampling_params=broken)])
    assert requests.requests["broken-00000000"].error is not None
    assert (len(opened), expected) == (2, [f"{name}-00000000" for name in ("changed", "unchanged", "broken")])
