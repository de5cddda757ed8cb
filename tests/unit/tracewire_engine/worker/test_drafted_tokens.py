"""How far drafted requests are, where vLLM counts their drafts as taken until it knows better."""

from __future__ import annotations

import random
from types import SimpleNamespace

from tracewire_engine.worker.drafted_tokens import DraftedTokens
from tracewire_engine.worker.step_states import RequestState


def states(**computed: int) -> dict[str, RequestState]:
    """Requests whose prompts have five tokens."""
    return {name: RequestState(tokens, 5) for name, tokens in computed.items()}


def test_drafts_that_were_not_taken_are_not_counted() -> None:
    """Of `a` and `b` all drafts are taken and one; `c` has none, and `d` no declared interventions."""
    known, order = DraftedTokens(), ["a", "b", "c", "d"]
    drafts = {"a": [-1] * 3, "b": [-1] * 3, "d": [-1] * 3}
    scheduled = {"a": 4, "b": 4, "c": 1, "d": 4}
    known.begin(order, scheduled, drafts, states(a=9, b=9, c=9, d=9), {"a", "b", "c"})
    assert known.waiting
    known.accept([4, 2, 1, 2])
    assert not known.waiting
    told = states(a=13, b=13, c=10, d=13)
    assert {name: known.computed(name, one.num_computed_tokens) for name, one in told.items()} == {
        "a": 13,
        "b": 11,
        "c": 10,
        "d": 13,
    }
    assert known.states(order, told) == {"b": RequestState(11, 5)}
    assert [known.generated(name, 5) for name in order] == [9, 7, None, None]


def test_a_scheduler_that_knows_is_taken_at_its_word() -> None:
    """So is one that has a preempted request computed anew, and one step behind that, nothing is known any more."""
    known = DraftedTokens()
    known.begin(["a"], {"a": 4}, {"a": [-1] * 3}, states(a=9), {"a"})
    known.accept([2])
    assert known.states(["a"], states(a=11)) == {}
    assert known.computed("a", 0) == 0
    known.begin(["a"], {"a": 12}, {}, states(a=0), {"a"})
    assert not known.waiting
    assert not known
    assert known.computed("a", 12) == 12


def test_a_step_without_a_request_leaves_what_is_known_of_it() -> None:
    known = DraftedTokens()
    known.begin(["a", "b"], {"a": 4, "b": 4}, {"a": [-1] * 3, "b": [-1] * 3}, states(a=9, b=9), {"a", "b"})
    known.accept([1, 1])
    known.begin(["b"], {"b": 1}, {}, states(b=10), {"a", "b"})
    assert (known.computed("a", 13), known.computed("b", 11)) == (10, 11)
    assert len(known) == 1
    known.forget(["a", "b"])
    assert not known


def test_a_scheduler_that_plans_ahead_is_followed() -> None:
    """Requests with random drafts, which rest at times: a step is planned before what the last one has taken counts."""
    for seed in range(20):
        dice, known = random.Random(seed), DraftedTokens()
        truth = {f"r{number}": 6 for number in range(4)}
        told, late = dict(truth), dict.fromkeys(truth, 0)
        for _ in range(60):
            order = [name for name in truth if dice.random() < 0.8]
            drafts = {name: [-1] * dice.randint(1, 3) for name in order if dice.random() < 0.7}
            scheduled = {name: 1 + len(drafts.get(name, ())) for name in order}
            given = {name: SimpleNamespace(num_computed_tokens=told[name], num_prompt_tokens=5) for name in order}
            corrected = {**given, **known.states(order, given)}
            assert {name: one.num_computed_tokens for name, one in corrected.items()} == {
                name: truth[name] for name in order
            }
            known.begin(order, scheduled, drafts, corrected, truth)
            # The scheduler learns what the step before this one has taken.
            for name, rejected in late.items():
                told[name] -= rejected
            late = dict.fromkeys(truth, 0)
            sampled = [1 + dice.randint(0, len(drafts.get(name, ()))) for name in order]
            if known.waiting:
                known.accept(sampled)
            for name, count in zip(order, sampled, strict=True):
                truth[name] += count
                told[name] += scheduled[name]
                late[name] = scheduled[name] - count
