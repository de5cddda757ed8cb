"""How far the requests of a step are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tracewire_engine.worker.step_states import RequestState, StepStates, computed_tokens, token_index_of


def _states(**resting: RequestState) -> StepStates:
    return StepStates(["b", "a"], [4, 9], [6, 5], {"a": 1, "b": 2}, resting)


def test_the_requests_of_the_step_come_before_the_resting_ones() -> None:
    states = _states(a=RequestState(1, 5), rests=RequestState(3, 2, 1))
    assert dict(states) == {"b": RequestState(4, 6, 1), "a": RequestState(9, 5, 6), "rests": RequestState(3, 2, 1)}
    assert len(states) == 3
    assert "c" not in states
    with pytest.raises(KeyError):
        states["c"]


def test_a_state_stays_as_it_was_changed() -> None:
    states = _states()
    states["a"].generated -= 2
    assert states["a"].generated == 4
    assert states.left(["b"]) == {"a": RequestState(9, 5, 4)}


@pytest.mark.parametrize(
    ("order", "left"), [(["b", "a"], set()), (["a", "b"], set()), (["b", "c"], {"a"}), ([], {"a", "b"})]
)
def test_what_a_later_step_lacks_is_left(order: list[str], left: set[str]) -> None:
    assert set(_states().left(order)) == left


@pytest.mark.parametrize("order", [["b", "a"], ["a", "b"], ["a"], ["rests", "b"]])
def test_computed_tokens_are_in_the_order_of_the_batch(order: list[str]) -> None:
    states = _states(rests=RequestState(3, 2))
    expected = {"a": 9, "b": 4, "rests": 3}
    plain: dict[str, Any] = {name: SimpleNamespace(num_computed_tokens=count) for name, count in expected.items()}
    assert computed_tokens(states, order) == [expected[name] for name in order]
    assert computed_tokens(plain, order) == [expected[name] for name in order]


@pytest.mark.parametrize("order", [["b", "a"], ["a", "b"], ["a"], ["rests", "a"]])
def test_indices_are_those_of_the_tokens_that_the_step_samples(order: list[str]) -> None:
    states, scheduled = _states(rests=RequestState(3, 2)), {"a": 1, "b": 2}
    plain: dict[str, Any] = {
        name: SimpleNamespace(num_computed_tokens=computed, num_prompt_tokens=prompt)
        for name, computed, prompt in (("a", 9, 5), ("b", 4, 6), ("rests", 3, 2))
    }
    for known in (states, plain):
        index_of = token_index_of(known, order, scheduled)
        assert [index_of(name) for name in order if name != "rests"] == [
            {"a": 5, "b": 0}[n] for n in order if n != "rests"
        ]


def test_a_step_without_traced_requests_has_no_states() -> None:
    """Nothing is asked of its requests."""
    index_of = token_index_of(StepStates([], [], [], {}, {}), ["plain"], {"plain": 1})
    with pytest.raises(KeyError):
        index_of("plain")
