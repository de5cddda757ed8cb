"""Conditions: what is refused before an engine hears of it, and how they travel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.tracewire_bus.domain.test_intervention_checks import HIDDEN, checked, tree
from tracewire_bus.domain.intervention_checks import (
    DeclarationError,
    check,
    decode_interventions,
    encode_arrays,
    normalize,
    substitute_live,
)
from tracewire_bus.wire.messages import Live, Probe, Steer, StopWhen, When

V = np.ones(HIDDEN, np.float32)
SCORE = Probe("score", "residual(1)", V)


def steer(when: Any) -> Steer:
    return Steer("residual(2)", V, when=when)


@pytest.mark.parametrize(
    ("when", "field", "says"),
    [
        (When(), "when", "expected a condition"),
        ("score > 1", "when", "expected a When, got str"),
        (When(probe="other", above=1.0), "when.probe", r"no probe 'other' is declared \(declared: score, wide\)"),
        (When(probe="wide", above=1.0), "when.probe", "does not save numbers of one location"),
        (When(probe="score"), "when.above", "expected a threshold"),
        (When(probe="score", above="much"), "when.above", "a number or Live"),  # type: ignore[arg-type]
        (When(probe="score", above=float("nan")), "when.above", "NaN"),
        (When(probe="score", above=1.0, output=1), "when.output", "has 1 outputs, got 1"),
        (When(above=1.0), "when.probe", "above needs the name of a probe"),
        (When(probe="score", above=1.0, below=0.0, release=0.5), "when.release", "goes with one threshold"),
        (When(probe="score", above=1.0, release=2.0), "when.release", "expected 1.0 or less"),
        (When(probe="score", below=1.0, release=0.0), "when.release", "expected 1.0 or more"),
        (When(start=-1), "when.start", "0 or more"),
        (When(start=5, stop=5), "when.stop", "the range is empty: expected more than 5, got 5"),
        (When(stop=0), "when.stop", "the range is empty"),
        (When(every=0), "when.every", "1 or more"),
        (When(every=1.5), "when.every", "an integer"),  # type: ignore[arg-type]
        (When(start=2**31), "when.start", "at most 2147483647, got 2147483648"),
        (When(start=2**32), "when.start", "at most 2147483647"),
        (When(stop=2**63), "when.stop", "at most 2147483647"),
        (When(stop=2**70), "when.stop", "at most 2147483647"),
        (When(every=2**32), "when.every", "at most 2147483647"),
        (When(probe="score", above=1.0, output=2**70), "when.output", "at most 2147483647"),
        (When(probe="score", above=1.0, output=-(2**70)), "when.output", "at most 2147483647"),
        (When(tokens=[]), "when.tokens", "1 to 1024 sequences"),
        (When(tokens=[[]]), "when.tokens", "sequences of 1 to 8"),
        (When(tokens=[list(range(9))]), "when.tokens", "sequences of 1 to 8"),
        (When(tokens=[[-1]]), "when.tokens", "sequences of 1 to 8"),
        (When(text=""), "when.text", "1 to 200 characters"),
        (When(text="a", tokens=[[1]]), "when.text", "got both"),
        (When(part="end"), "when.part", "'prompt' or 'answer'"),  # type: ignore[arg-type]
        (When(probe="score", above=Live("bound")), "when.above", "was not declared"),
    ],
)
def test_a_condition_that_cannot_hold_is_refused_by_its_field(when: Any, field: str, says: str) -> None:
    with pytest.raises(DeclarationError, match=says) as error:
        checked(SCORE, Probe("wide", "residual(*)", V), steer(when))
    assert error.value.field == f"interventions[2].{field}"


@pytest.mark.parametrize("name", ["start", "stop", "every"])
def test_an_engine_refuses_an_index_that_it_cannot_count_to(name: str) -> None:
    """What another client than ours sends was not made plain by ours."""
    for value in (2**31 - 1, 2**31, 2**32, 2**63):
        sent = decode_interventions([encode_arrays(steer(When(**{name: value})), {"vector": V})])
        if value < 2**31:
            check(sent, tree(), hidden_size=HIDDEN, live={})
            continue
        with pytest.raises(DeclarationError, match=f"at most 2147483647, got {value}") as error:
            check(sent, tree(), hidden_size=HIDDEN, live={})
        assert error.value.field == f"interventions[0].when.{name}"


def test_probes_whose_conditions_depend_on_each_other_are_refused() -> None:
    first = Probe("a", "residual(1)", V, when=When(probe="b", above=0.0))
    second = Probe("b", "residual(1)", V, when=When(probe="c", above=0.0))
    third = Probe("c", "residual(1)", V, when=When(probe="a", above=0.0))
    with pytest.raises(DeclarationError, match="cyclic: a -> b -> c -> a") as error:
        checked(first, second, third)
    assert error.value.field == "interventions[0].when.probe"
    # In any order, as long as it ends somewhere.
    checked(first, second, Probe("c", "residual(1)", V))


def test_a_stop_has_no_condition_of_its_own() -> None:
    with pytest.raises(DeclarationError, match="give one to the probe 'score'"):
        checked(SCORE, StopWhen("score", above=1.0, when=When(every=2)))


def test_a_condition_travels_in_plain_values() -> None:
    given = When(probe="score", above=np.float32(0.5), tokens=np.array([3, 4]), start=np.int64(2))  # type: ignore[arg-type]
    _, sent = decode_interventions(normalize([SCORE, steer(given)]))
    assert sent.when == When(probe="score", above=0.5, tokens=[[3, 4]], start=2)
    (several,) = normalize([steer(When(tokens=[[1], (2, 3)]))])  # type: ignore[list-item]
    assert several.when == When(tokens=[[1], [2, 3]])


def test_thresholds_can_be_live() -> None:
    one = steer(When(probe="score", above=Live("bound"), release=-1.0))
    checked(SCORE, one, live={"bound": 1.0})
    with pytest.raises(DeclarationError, match="must be a number") as error:
        checked(SCORE, one, live={"bound": V})
    assert error.value.field == "interventions[1].when.above"
    assert substitute_live(one, {"bound": 2.0}).when == When(probe="score", above=2.0, release=-1.0)
