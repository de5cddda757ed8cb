"""The vectorised plans of declared interventions against the same thing done request by request."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.support.declared_plans import (
    HEAD,
    HIDDEN,
    Request,
    play,
)
from tracewire_bus.domain.intervention_checks import normalize
from tracewire_bus.wire.messages import LogitLens, Steer, When
from tracewire_bus.wire.packing import pack
from tracewire_engine.protocol.messages import Placed
from tracewire_engine.worker.blocks.live_params import LiveRuns
from tracewire_engine.worker.declared import plan as plans_of
from tracewire_engine.worker.declared.ops import Declaration
from tracewire_engine.worker.declared.plan import DeclaredRequests


@pytest.mark.parametrize("seed", range(30))
def test_plans_are_what_a_loop_over_requests_gives(seed: int) -> None:
    play(seed, DeclaredRequests(torch.device("cpu")))


@pytest.mark.parametrize("seed", range(8))
def test_plans_are_the_same_where_interventions_refer_to_their_arrays(seed: int, tmp_path: Path) -> None:
    declared = DeclaredRequests(torch.device("cpu"))
    declared.decoded.vectors.folder = tmp_path
    play(seed, declared, tmp_path)
    assert list(tmp_path.iterdir())


@pytest.mark.parametrize("seed", range(40))
def test_a_drafted_row_is_served_as_a_step_of_its_own_would_be(seed: int) -> None:
    """Edits act on all rows, and reads come from those that the model took, each with its token's index."""
    play(seed, DeclaredRequests(torch.device("cpu")), drafts=3)


def test_the_same_batch_again_costs_no_new_plan() -> None:
    rng = random.Random(5)
    declared = DeclaredRequests(torch.device("cpu"))
    requests = [Request(f"r{index}", rng) for index in range(4)]
    for request in requests:
        request.state.num_computed_tokens = request.prompt
        run = LiveRuns().join("run", pack(request.live), request.name, request.name, 0)
        declared.add(request.name, Declaration(request.name, 0, request.encoded, run, declared.decoded))
    plans = set()
    for _ in range(5):
        states = {request.name: request.state for request in requests}
        declared.begin(list(states), dict.fromkeys(states, 1), 4, states)
        plans.add(id(declared.plan))
        for stage in declared.hooks.values():
            stage.run((torch.randn(4, HIDDEN), torch.randn(4, HIDDEN)))
        collected = declared.collect(lambda values: values @ HEAD.T)
        assert collected is None or (collected[0] is None) == (len(plans) == 1 and declared.plan.steps > 0)
        for request in requests:
            request.state.num_computed_tokens += 1
    assert len(plans) == 1


def test_a_plan_is_made_anew_when_a_request_beside_it_has_other_tokens() -> None:
    """A drafted request has several tokens in a step, and may get one further by it."""
    rng = random.Random(5)
    declared = DeclaredRequests(torch.device("cpu"))
    request = Request("declared", rng)
    request.state.num_computed_tokens = request.prompt
    run = LiveRuns().join("run", pack(request.live), request.name, request.name, 0)
    declared.add(request.name, Declaration(request.name, 0, request.encoded, run, declared.decoded))
    plain = Request("plain", rng)
    plain.state.num_computed_tokens = plain.prompt
    plans = []
    for tokens in (4, 4, 1, 1, 2):
        states = {"plain": plain.state, request.name: request.state}
        declared.begin(list(states), {"plain": tokens, request.name: 1}, tokens + 1, states)
        plans.append(declared.plan)
        for stage in declared.hooks.values():
            stage.run((torch.randn(tokens + 1, HIDDEN), torch.randn(tokens + 1, HIDDEN)))
        declared.collect(lambda values: values @ HEAD.T)
        # None of the drafts was taken.
        plain.state.num_computed_tokens += 1
        request.state.num_computed_tokens += 1
    assert [plans.index(plan) for plan in plans] == [0, 0, 2, 2, 4]


def test_the_head_has_so_many_rows_of_a_step_at_once() -> None:
    """Those of all requests, positions and locations."""
    declared = DeclaredRequests(torch.device("cpu"))
    declared.lens_rows, counts = 4, {"a": 2, "b": 3}
    (one,) = normalize([LogitLens("l", "residual(*)", top_k=3, positions="all")])
    encoded = msgspec.msgpack.encode([Placed(one, [(f"layer.{layer}.output", True) for layer in range(3)], True)])
    for name in ("a", "b"):
        run = LiveRuns().join("r", pack({}), name, name, 0)
        declared.add(name, Declaration(name, 0, encoded, run, declared.decoded))
    states = {name: SimpleNamespace(num_computed_tokens=0, num_prompt_tokens=count) for name, count in counts.items()}
    declared.begin(list(counts), counts, 5, states)
    for hook in declared.hooks.values():
        hook.run((torch.randn(5, HIDDEN), torch.randn(5, HIDDEN)))
    made: list[int] = []

    def lens(values: torch.Tensor) -> torch.Tensor:
        made.append(len(values))
        return values @ HEAD.T

    assert declared.collect(lens) is not None
    assert sum(made) == 15
    assert max(made) == 4


def steered(declared: DeclaredRequests, name: str, scale: float) -> None:
    """Add a request with one `Steer` at every other token."""
    one = normalize([Steer("residual(0)", np.ones(HIDDEN, np.float32), scale=scale, when=When(start=0, every=2))])[0]
    encoded = msgspec.msgpack.encode([Placed(one, [("layer.0.output", True)])])
    declared.add(name, Declaration(name, 0, encoded, LiveRuns().join("r", pack({}), name, name, 0), declared.decoded))


def step_of(declared: DeclaredRequests, names: list[str], computed: int) -> list[float]:
    """Compute a token of each of these requests with prompts of 5. Returns what is added to each."""
    states = {name: SimpleNamespace(num_computed_tokens=computed, num_prompt_tokens=5) for name in names}
    declared.begin(names, dict.fromkeys(names, 1), len(names), states)
    rows = torch.zeros(len(names), HIDDEN), torch.zeros(len(names), HIDDEN)
    for hook in declared.hooks.values():
        hook.run(rows)
    declared.collect(lambda values: values @ HEAD.T)
    return rows[0][:, 0].tolist()


def test_interventions_that_cannot_be_planned_end_their_own_request() -> None:
    """They share a group with those of others, which go on in the same step."""
    declared = DeclaredRequests(torch.device("cpu"))
    for name, scale in (("one", 1.0), ("odd", 9.0), ("two", 2.0)):
        steered(declared, name, scale)
    assert step_of(declared, ["one", "odd", "two"], 6) == [1.0, 9.0, 2.0]
    # No check lets this through.
    odd = declared.live["odd"].ops[0]
    odd.one = msgspec.structs.replace(odd.one, when=When(start=0, stop=2**63, every=2))
    declared.stale = True
    assert step_of(declared, ["one", "odd", "two"], 8) == [1.0, 0.0, 2.0]
    failure = declared.live["odd"].failure
    assert failure is not None
    assert (failure.type, failure.field) == ("OverflowError", "interventions")
    assert failure.message.startswith("the interventions cannot be planned: ")
    # It is reported with the step.
    assert [one.request for one, _ in declared.served.failed] == ["odd"]
    assert [declared.live[name].failure for name in ("one", "two")] == [None, None]
    assert step_of(declared, ["one", "odd", "two"], 9) == [0.0, 0.0, 0.0]
    assert step_of(declared, ["one", "odd", "two"], 10) == [1.0, 0.0, 2.0]


def test_requests_that_cannot_be_planned_together_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plans_of._planned

    def limited(owner: Any, step: Any, live: Any) -> Any:
        if sum(one.failure is None for one in live.values()) > 1:
            raise MemoryError("two are too many")
        return planned(owner, step, live)

    monkeypatch.setattr(plans_of, "_planned", limited)
    declared = DeclaredRequests(torch.device("cpu"))
    for name in ("one", "two"):
        steered(declared, name, 1.0)
    assert step_of(declared, ["one", "two"], 6) == [0.0, 0.0]
    failures = [one.failure for one in declared.live.values()]
    assert [one.message for one in failures if one is not None] == [
        "the interventions cannot be planned: two are too many"
    ] * 2
    assert len(declared.served.failed) == 2
    # The worker goes on.
    steered(declared, "three", 3.0)
    assert step_of(declared, ["one", "three", "two"], 8) == [0.0, 3.0, 0.0]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_step_that_is_planned_again_is_what_it_was(seed: int, drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first plan of each step fails at its end, when it has noted how each request is served."""
    planned, tried = plans_of._planned, set()

    def failing(owner: DeclaredRequests, step: Any, live: Any) -> Any:
        made = planned(owner, step, live)
        if owner.served.step not in tried:
            tried.add(owner.served.step)
            raise ValueError("not this one")
        return made

    monkeypatch.setattr(plans_of, "_planned", failing)
    play(seed, DeclaredRequests(torch.device("cpu")), drafts=drafts)
    assert tried
