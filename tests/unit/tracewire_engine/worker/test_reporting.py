"""Reports of steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import tracewire_engine  # noqa: F401 (before nnsight)
from tests.support.declared_plans import HEAD, HIDDEN
from tests.support.equality import equal
from tracewire_bus.domain.intervention_checks import normalize
from tracewire_bus.wire.messages import Append, Delta, Live, Patch, Probe, Steer
from tracewire_bus.wire.packing import decoder, wire
from tracewire_engine.protocol.messages import Placed, Report
from tracewire_engine.worker.blocks.live_params import LiveRun
from tracewire_engine.worker.blocks.time_limit import BlockTimeout
from tracewire_engine.worker.declared.ops import Declaration
from tracewire_engine.worker.declared.plan import DeclaredRequests
from tracewire_engine.worker.host_copy import HostCopy, encoded_late
from tracewire_engine.worker.reporting import PendingReport, StepReporter, _collect_new, _encoded
from tracewire_engine.worker.save_tracker import SaveTracker

ENCODER = msgspec.msgpack.Encoder(enc_hook=encoded_late)


DELTAS = decoder(list[Delta])


def test_a_step_of_one_item_is_encoded_as_any_other() -> None:
    for shape in ((0,), (1,), (7,), (3, 100), (40_000,)):
        value, host = torch.ones(shape, dtype=torch.bfloat16), HostCopy()
        host.prime([value])
        deltas = [Append(path=("name",), items=[host.array(value) or wire(value)])]
        (mine,), (other,) = DELTAS(_encoded(deltas)), DELTAS(ENCODER.encode(deltas))
        assert (type(mine), mine.path) == (type(other), other.path)
        assert equal(mine.items, other.items)
        assert equal(mine.items, [value])


def test_a_time_that_is_up_while_arrays_are_found_is_met_where_the_trace_fails() -> None:
    tracker = SaveTracker()
    saves: dict[str, Any] = {"held": {}, "more": [torch.ones(1)]}
    tracker.step(saves)

    @contextmanager
    def over() -> Iterator[None]:
        raise BlockTimeout("the time is up")
        yield

    tracker.guard = over
    saves["held"]["new"] = torch.zeros(1)
    found: list[Any] = []
    _collect_new(tracker, saves, found)
    assert found == []
    with pytest.raises(BlockTimeout):
        tracker.step(saves)


class _Steps:
    """Steps of a worker whose requests have declared interventions, and what it reports of each."""

    def __init__(self) -> None:
        self.declared = DeclaredRequests(torch.device("cpu"))
        link: Any = SimpleNamespace(put=lambda flat, report: None)
        requests: Any = SimpleNamespace(declared=self.declared, traced={})
        self.reporter = StepReporter(link, None, requests, lambda values: values @ HEAD.T)

    def add(self, name: str, *interventions: Any, live: LiveRun | None = None) -> None:
        """Take a request."""
        encoded = msgspec.msgpack.encode(
            [Placed(one, [("layer.0.output", True)]) for one in normalize(list(interventions))]
        )
        self.declared.add(name, Declaration(name, 0, encoded, live or LiveRun(""), self.declared.decoded))

    def step(self, states: dict[str, Any], tokens: int = 1) -> Report:
        """Run a step with so many tokens of each request."""
        declared, total = self.declared, tokens * len(states)
        if declared.pending:
            declared.begin(list(states), dict.fromkeys(states, tokens), total, states)
        for hook in declared.hooks.values():
            hook.run((torch.ones(total, HIDDEN), torch.ones(total, HIDDEN)))
        if self.reporter.pending():
            self.reporter.report_declared()
        for state in states.values():
            state.num_computed_tokens += tokens
        report, self.reporter.unsent = self.reporter.unsent.report, PendingReport(Report())
        return report


def request_state(prompt: int, computed: int) -> Any:
    return SimpleNamespace(num_prompt_tokens=prompt, num_computed_tokens=computed)


def ended(report: Report) -> list[tuple[str, int, str]]:
    return [(one.request, one.index, one.ended) for one in report.steps]


def test_a_failure_of_making_a_plan_is_reported_with_its_step() -> None:
    steps = _Steps()
    steps.add("wrong", Patch("", np.zeros((3, HIDDEN), np.float32), positions=[0, 1]), Probe("p", ""))
    states = {"wrong": request_state(4, 0)}
    assert ended(steps.step(states, 4)) == [("wrong", 0, "error")]
    assert ended(steps.step(states)) == []


def test_a_failure_between_steps_is_reported_with_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a live vector for which the device has no room. A request that rests is told of when it goes on."""
    steps, run = _Steps(), LiveRun("run")
    run.values = {"way": np.ones(HIDDEN, np.float32)}
    for name in ("goes", "rests"):
        steps.add(name, Steer("", Live("way")), Probe("p", ""), live=run)
        run.requests[name] = name, 0
    states = {"goes": request_state(4, 4), "rests": request_state(4, 4)}
    assert ended(steps.step(states)) == []

    def fail(*_: Any) -> bool:
        raise MemoryError("no room")

    monkeypatch.setattr(Declaration, "update_live", fail)
    steps.declared.update_live(run)
    resting = states.pop("rests")
    assert ended(steps.step(states)) == [("goes", 2, "error")]
    assert ended(steps.step(states)) == []
    assert ended(steps.step({**states, "rests": resting})) == [("rests", 2, "error")]
    assert ended(steps.step({**states, "rests": resting})) == []


def test_nothing_is_reported_when_the_last_request_has_gone() -> None:
    """Although its plan had no place in the last steps."""
    steps = _Steps()
    steps.add("prompt", Probe("p", "", positions="prompt"))
    states = {"prompt": request_state(4, 0)}
    assert steps.step(states, 4).batch is not None
    steps.step(states)
    steps.declared.pop("prompt")
    states = {"plain": request_state(4, 9)}
    for _ in range(2):
        report = steps.step(states)
        assert (report.layout, report.batch, report.steps) == (None, None, [])
    assert not steps.declared.pending
    assert not steps.reporter.pending()
