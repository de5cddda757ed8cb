"""Which requests are drafted, and what drafting takes of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tracewire_bus.domain.intervention_checks import normalize
from tracewire_bus.wire.messages import AttentionPattern, Hold, Live, Probe, Steer, StopWhen, When
from tracewire_engine.protocol.drafting import draft_slots, undrafted
from tracewire_engine.protocol.keys import BLOCK_ARG, DECLARED_ARG, EDITS_ARG, FORCED_ARG, LIVE_ARG, SCHEDULE_ARG
from tracewire_engine.protocol.messages import Placed

VECTOR = [1.0, 0.0]


def _why(*interventions: Any, arguments: tuple[str, ...] = ()) -> str:
    placed = [Placed(one, [("layer.1.output", True)], False) for one in normalize(interventions)]
    return undrafted({**dict.fromkeys(arguments, b""), DECLARED_ARG: msgspec.msgpack.encode(placed)})


def test_an_engine_without_drafts_keeps_its_steps_to_itself() -> None:
    assert draft_slots(SimpleNamespace(speculative_config=None)) == 0


def test_a_drafting_model_takes_places_for_each_request() -> None:
    config = SimpleNamespace(max_num_new_slots_for_drafting=2)
    assert draft_slots(SimpleNamespace(speculative_config=config)) == 2


def test_what_acts_on_each_row_by_itself_is_drafted() -> None:
    assert undrafted({}) == undrafted({FORCED_ARG: [1]}) == ""
    assert _why(arguments=(LIVE_ARG,)) == undrafted({FORCED_ARG: [1]}) == ""
    steer = Steer("", VECTOR, scale=Live("alpha"), when=When(start=2, tokens=[[7]], part="answer"))
    assert _why(Probe("p", ""), steer, StopWhen("p", above=1.0, steps=3)) == ""


@pytest.mark.parametrize(
    ("interventions", "why"),
    [
        ([Hold("h", "", VECTOR, "p", 1.0, 0.0, 2.0)], "a Hold goes on from the step before"),
        ([AttentionPattern("a", "")], "an AttentionPattern keeps the keys of each step"),
        (
            [Steer("", VECTOR, when=When(probe="p", above=1.0))] * 2,
            "a condition on a probe goes on from the step before",
        ),
    ],
    ids=["hold", "pattern", "condition"],
)
def test_what_goes_on_from_step_to_step_is_not_and_says_so_once(interventions: list[Any], why: str) -> None:
    assert _why(Probe("p", "", VECTOR), *interventions) == why


def test_each_reason_is_told() -> None:
    found = _why(AttentionPattern("a", ""), arguments=(BLOCK_ARG, EDITS_ARG, SCHEDULE_ARG))
    assert found.split("; ") == [
        "a block runs once for each token",
        "a standing block runs once for each token",
        "scheduled changes of live parameters begin at a token of their own",
        "an AttentionPattern keeps the keys of each step",
    ]
