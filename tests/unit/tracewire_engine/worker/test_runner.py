"""The runner's own steps, without an engine."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

import tracewire_engine  # noqa: F401 (before nnsight)
from tracewire_engine.worker.blocks.live_params import LiveRun
from tracewire_engine.worker.drafted_tokens import DraftedTokens
from tracewire_engine.worker.runner import TracewireRunner, _last_rows


def test_a_change_is_told_of_with_the_token_that_its_step_samples() -> None:
    """Of requests whose prompt is computed, that generate, that are in no step for now, and that have gone.

    The last step of the one that rests had drafts, of which vLLM does not know yet how many were taken.
    """
    run = LiveRun("run")
    run.version = 3
    run.requests = {
        name: (f"t-{name}", choice) for choice, name in enumerate(("prompt", "going", "preempted", "rests", "gone"))
    }
    state = partial(SimpleNamespace, num_prompt_tokens=5)
    states = {
        "prompt": state(num_computed_tokens=0),
        "going": state(num_computed_tokens=7),
        "preempted": state(num_computed_tokens=0),
        "rests": state(num_computed_tokens=13),
    }
    drafted = DraftedTokens()
    drafted.begin(["rests"], {"rests": 4}, {"rests": [-1] * 3}, {"rests": state(num_computed_tokens=9)}, {"rests"})
    drafted.accept([2])
    worker = SimpleNamespace(
        request_states=lambda: states,
        generated={"preempted": 4}.__getitem__,
        tracewire_drafted=drafted,
        tracewire_requests=SimpleNamespace(live=SimpleNamespace(late=1)),
    )
    applied = TracewireRunner._applied(worker, run, {"prompt": 4, "going": 1})
    assert (applied.run, applied.version) == ("run", 3)
    # The prompt's next step samples its first token.
    assert applied.first == [("t-prompt", 0, 0), ("t-going", 1, 3), ("t-preempted", 2, 4), ("t-rests", 3, 7)]


class _Planned(TracewireRunner):
    """A runner whose requests have plans, and that has no model."""

    def __init__(self, forced: dict[str, list[int]], scheduled: dict[str, Any]) -> None:
        self.advanced: dict[str, int] = {}
        self.tracewire_requests: Any = SimpleNamespace(forced=forced, scheduled=scheduled, advance=self.advanced.update)
        self.tracewire_unwatched = True
        found: list[list[int]] = []
        plan = SimpleNamespace(drafted=False, found=found, accept=found.append)
        self.tracewire_declared: Any = SimpleNamespace(plan=plan)
        self.tracewire_drafted = DraftedTokens()


def _state(computed: int, prompt: int) -> Any:
    return SimpleNamespace(num_computed_tokens=computed, num_prompt_tokens=prompt)


def test_given_tokens_replace_the_rows_of_their_steps() -> None:
    """The first of `a`, the third of `b`; `c` has had all of its own, `d` has none, and `e` is within its prompt."""
    runner = _Planned({"a": [5, 6], "b": [7, 8, 9], "c": [1], "e": [3]}, {})
    order = ["d", "b", "a", "c", "e"]
    states = {"a": _state(0, 4), "b": _state(6, 5), "c": _state(9, 3), "d": _state(0, 2), "e": _state(0, 8)}
    scheduled = {"a": 4, "b": 1, "c": 1, "d": 2, "e": 3}
    runner._follow_plans(scheduled, order, states)
    assert runner.tracewire_forced == [(1, 9), (2, 5)]
    assert runner.advanced == {"a": 0, "b": 2, "c": 7, "e": -5}
    drawn = torch.tensor([[40], [41], [42], [43], [44]], dtype=torch.int32)
    served = runner.serve_samples(drawn)
    assert served.flatten().tolist() == [40, 9, 5, 43, 44]
    assert served.dtype == torch.int32
    # What the sampler keeps is its own.
    assert drawn.flatten().tolist() == [40, 41, 42, 43, 44]


def test_a_step_without_plans_costs_nothing() -> None:
    runner = _Planned({}, {})
    runner._follow_plans({"a": 1}, ["a"], {})
    assert runner.tracewire_forced == []
    assert runner.advanced == {}


def test_scheduled_requests_are_told_their_tokens() -> None:
    runner = _Planned({}, {"a": object()})
    runner._follow_plans({"a": 1, "b": 1}, ["b", "a"], {"a": _state(7, 4), "b": _state(1, 1)})
    assert runner.advanced == {"a": 4}


def test_tokens_are_given_in_steps_with_drafts_of_others() -> None:
    """`a` is drafted. `b` gets its second token, and has placeholders in the place of drafts, which nobody takes.

    Declared interventions are told how many tokens each has got.
    """
    runner = _Planned({"b": [7, 8]}, {})
    states = {"a": _state(9, 4), "b": _state(6, 6)}
    runner._follow_plans({"a": 1, "b": 1}, ["a", "b"], states)
    assert runner.tracewire_forced == [(1, 8)]
    drawn = torch.tensor([[40, 41, -1], [42, -1, -1]], dtype=torch.int32)
    plan: Any = runner.tracewire_declared.plan
    assert runner.serve_samples(drawn).tolist() == [[40, 41, -1], [8, -1, -1]]
    assert plan.found == []
    plan.drafted = True
    drafts = {"a": [-1, -1], "b": [-1, -1]}
    runner.tracewire_drafted.begin(["a", "b"], {"a": 3, "b": 3}, drafts, states, {"a"})
    runner.serve_samples(drawn)
    assert plan.found == [[2, 1]]
    # One of the two drafts of `a` was taken.
    assert runner.tracewire_drafted.computed("a", 12) == 11


def test_the_last_row_of_each_request_is_served_of_a_step_with_drafts() -> None:
    assert _last_rows({"a": [5, 6], "c": [7]}, ["a", "b", "c", "d"]) == [2, 3, 5, 6]
