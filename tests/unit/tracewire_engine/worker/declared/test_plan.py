"""The vectorised plans of declared interventions against the same thing done request by request."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.support.declared_plans import (
    HEAD,
    HIDDEN,
    Request,
    play,
)
from tracewire_bus.wire.packing import pack
from tracewire_engine.worker.blocks.live_params import LiveRuns
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
