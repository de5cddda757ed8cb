"""Requests that go on are served as in the step before."""

from __future__ import annotations

import random
from types import SimpleNamespace

import msgspec
import torch

from tests.support.declared_plans import HEAD, HIDDEN, Request
from tracewire_bus.domain.intervention_checks import normalize
from tracewire_bus.wire.messages import Probe
from tracewire_bus.wire.packing import pack
from tracewire_engine.protocol.messages import Placed
from tracewire_engine.worker.blocks.live_params import LiveRun, LiveRuns
from tracewire_engine.worker.declared.conditions import Signals
from tracewire_engine.worker.declared.gathering import Gathering
from tracewire_engine.worker.declared.ops import Declaration
from tracewire_engine.worker.declared.plan import DeclaredRequests
from tracewire_engine.worker.declared.served_requests import ServedRequests

CPU = torch.device("cpu")


def test_a_request_that_goes_on_is_served_as_before_whoever_comes_and_goes() -> None:
    """Its row may be another one. A request that a step leaves out is served anew."""
    rng = random.Random(5)
    declared = DeclaredRequests(torch.device("cpu"))
    requests = {name: Request(name, rng) for name in "abcd"}
    for name, request in requests.items():
        request.state.num_computed_tokens = request.prompt
        run = LiveRuns().join(name, pack(request.live), name, name, 0)
        declared.add(name, Declaration(name, 0, request.encoded, run, declared.decoded))

    def step(order: str) -> dict[str, int]:
        states = {name: requests[name].state for name in order}
        declared.begin(list(order), dict.fromkeys(states, 1), len(order), states)
        for stage in declared.hooks.values():
            stage.run((torch.randn(len(order), HIDDEN), torch.randn(len(order), HIDDEN)))
        declared.collect(lambda values: values @ HEAD.T)
        for name, state in states.items():
            state.num_computed_tokens += 1
            index = state.num_computed_tokens - state.num_prompt_tokens
            assert declared.served._known[name].index_in(declared.served.step) == index
        assert declared.plan is not None
        return {one.declaration.request: id(one) for one in declared.plan.declarations}

    first = step("abcd")
    assert step("abcd") == first
    moved = step("adc")
    assert [one.row for one in declared.plan.declarations] == [0, 1, 2]
    assert declared.live["d"].rows == (1, 1)
    assert {name: moved[name] == first[name] for name in "adc"} == {"a": True, "d": True, "c": True}
    assert declared.live["b"].seen == requests["b"].state.num_computed_tokens
    again = step("adcb")
    assert {name: again[name] == moved.get(name) for name in "adcb"} == {"a": True, "d": True, "c": True, "b": False}
    declared.pop("a")
    assert set(declared.served._known) == set("bcd")


def test_a_row_is_served_as_before_if_nothing_is_between() -> None:
    """Prompts, drafts, and tokens that were left out or are computed again, are not as before."""
    known = DeclaredRequests(CPU)
    encoded = msgspec.msgpack.encode([Placed(one, [("layer.0.output", True)]) for one in normalize([Probe("p", "")])])
    declaration = Declaration("r", 0, encoded, LiveRun(""), known.decoded)
    declaration.id = "r"
    requests, states = ServedRequests(Signals(CPU)), {"r": SimpleNamespace(num_prompt_tokens=5)}
    found = []
    # How many tokens were computed before the step, how many it computes, and how many of these are drafts.
    for first, count, drafted in [
        (0, 5, 0),
        (5, 1, 0),
        (6, 1, 0),
        (7, 1, 0),
        (8, 2, 1),
        (9, 1, 0),
        (12, 1, 0),
        (7, 1, 0),
    ]:
        requests.step += 1
        drafts = {"r": [-1] * drafted} if drafted else {}
        gathering = Gathering(lambda members, error: None, requests.step)
        (served,) = requests.serve({"r": declaration}, [("r", first, count)], states, drafts, gathering)
        assert served.index_in(requests.step) == first + count - drafted - 5
        ((members, rows),) = gathering.groups(count, CPU)
        assert [one.index for one in members] == [first + each - 4 for each in range(count - drafted - 1, count)]
        assert rows.numbers.tolist() == list(range(count - drafted - 1, count))
        found.append((served, served.generates, served.lasting, declaration.seen))
    assert [(generates, lasting) for _, generates, lasting, _ in found] == [
        (False, False),
        *[(True, True)] * 3,
        (False, False),
        *[(True, True)] * 2,
        # It was read before.
        (True, False),
    ]
    assert [one is found[1][0] for one, *_ in found] == [False, True, True, True, False, False, False, False]
    assert [seen for *_, seen in found] == [0, 5, 5, 5, 8, 9, 10, 13]
