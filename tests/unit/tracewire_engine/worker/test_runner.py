"""The runner's own steps, without an engine."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import tracewire_engine  # noqa: F401 (before nnsight)
from tracewire_engine.worker.blocks.live_params import LiveRun
from tracewire_engine.worker.runner import TracewireRunner


def test_a_change_is_told_of_with_the_token_that_its_step_samples() -> None:
    """Of requests whose prompt is computed, that generate, that are in no step for now, and that have gone."""
    run = LiveRun("run")
    run.version = 3
    run.requests = {name: (f"t-{name}", choice) for choice, name in enumerate(("prompt", "going", "preempted", "gone"))}
    state = partial(SimpleNamespace, num_prompt_tokens=5)
    states = {
        "prompt": state(num_computed_tokens=0),
        "going": state(num_computed_tokens=7),
        "preempted": state(num_computed_tokens=0),
    }
    worker = SimpleNamespace(
        request_states=lambda: states,
        generated={"preempted": 4}.__getitem__,
        tracewire_requests=SimpleNamespace(live=SimpleNamespace(late=1)),
    )
    applied = TracewireRunner._applied(worker, run, {"prompt": 4, "going": 1})
    assert (applied.run, applied.version) == ("run", 3)
    # The prompt's next step samples its first token.
    assert applied.first == [("t-prompt", 0, 0), ("t-going", 1, 3), ("t-preempted", 2, 4)]
