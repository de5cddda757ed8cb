"""What drafting takes of a step."""

from __future__ import annotations

from types import SimpleNamespace

from tracewire_engine.protocol.drafting import draft_slots


def test_an_engine_without_drafts_keeps_its_steps_to_itself() -> None:
    assert draft_slots(SimpleNamespace(speculative_config=None)) == 0


def test_a_drafting_model_takes_places_for_each_request() -> None:
    config = SimpleNamespace(max_num_new_slots_for_drafting=2)
    assert draft_slots(SimpleNamespace(speculative_config=config)) == 2
